"""Receive the body of a request, and stop work for a client that is too slow or has disconnected."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from litestar.types import Receive

from app.api.context import PAUSE_SECONDS, BodyLimits
from app.errors import BodyTimeout, BodyTooLarge, ClientGone, MalformedRequest
from app.resilience.interruption import Interruption
from app.resilience.uploads import Upload

_MAX_CHUNKS = 64
_COUNT_BYTES = 1 << 16
# Waiting for a disconnect needs a task, so short requests are not watched.
_FIRST_CHECK_SECONDS, _CHECK_SECONDS = 0.1, 0.25
_DRAIN_SECONDS = 2.0
_GONE = "the client disconnected before the end of the body"
_ANONYMOUS_BYTES = 1 << 20


class ClientWatch(Interruption):
    """Raises BodyTimeout from a `with` block when the body arrives too slowly, ClientGone when the client leaves after it."""

    def __init__(self, receive: Receive, limits: BodyLimits) -> None:
        self.is_body_complete = False
        self._receive = receive
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._start = self._progress = self._loop.time()
        self._waiting: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(_FIRST_CHECK_SECONDS, self._check)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._timer.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None  # its CancelledError refers to this object
        super().__exit__(kind, error, traceback)

    async def read_body(self, upload: Upload, *, may_be_empty: bool = False, is_last: bool = True) -> bytes:
        """Receive the whole body, large ones counted in `upload`; it ends the time limit if `is_last`, else the caller does."""
        receive, max_bytes = self._receive, self._limits.max_bytes
        chunks: list[bytes | bytearray] = []
        rest = bytearray()  # a list of many small chunks would cost more than the body itself
        received = counted = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone(_GONE)
            chunk = message["body"]
            received += len(chunk)
            if received > max_bytes:
                raise body_too_large(max_bytes)
            if len(chunks) < _MAX_CHUNKS:
                chunks.append(chunk)
            else:
                rest += chunk
            if not message["more_body"]:
                self.is_body_complete = is_last
                break
            self._progress = self._loop.time()
            if received - counted >= _COUNT_BYTES:
                upload.add(received - counted)
                counted = received
        if not received and not may_be_empty:
            raise MalformedRequest("the body is empty; curl --data-binary @FILE sends nothing if it cannot read FILE")
        if rest:
            chunks.append(rest)
        return b"".join(chunks)  # no copy if there is only one chunk

    async def receive_parts(self) -> AsyncIterator[bytes]:
        """Receive the body part by part; raise ClientGone before its end."""
        while not self.is_body_complete:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone(_GONE)
            yield message["body"]
            self._progress = self._loop.time()
            self.is_body_complete = not message["more_body"]

    def _check(self) -> None:
        if self.is_body_complete:
            self._waiting = self._loop.create_task(self._wait_for_disconnect())
            return
        total = self._limits.total_seconds
        pause = min(PAUSE_SECONDS, total)
        left = min(self._progress + pause, self._start + total) - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(min(left, _CHECK_SECONDS), self._check)
        else:
            self.interrupt(BodyTimeout(f"a body has to arrive within {total:g} s, without pauses of more than {pause:g} s"))

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone("the client disconnected before the response"))


def body_too_large(max_bytes: int) -> BodyTooLarge:
    """Return the error for a body above the limit."""
    return BodyTooLarge(f"the limit is {round(max_bytes / 2**20, 3):g} MiB")


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request with these headers has a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def drain(receive: Receive, *, is_anonymous: bool = False) -> None:
    """Receive and discard the rest of a body for up to two seconds; an anonymous sender has to wait after the first MiB."""
    received = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                received += len(message["body"])
                if is_anonymous and received > _ANONYMOUS_BYTES:
                    await asyncio.sleep(_DRAIN_SECONDS)
