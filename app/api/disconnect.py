"""Stop work for a client that has disconnected."""

import asyncio
from types import TracebackType

from litestar.types import Receive

from app.errors import ClientGone

# A task costs as much as a tenth of the cheapest request, so short requests are not watched.
_WATCH_AFTER_SECONDS = 0.25


class CancelOnDisconnect:
    """Cancels an `async with` block when the client disconnects, if the block has not ended soon.

    The body must have been received. The block then raises `ClientGone`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self._is_gone = False

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._request = asyncio.current_task()
        self._timer = self._loop.call_later(_WATCH_AFTER_SECONDS, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        request, self._request = self._request, None  # no cycle: the task refers to this block
        if self._is_gone and isinstance(error, asyncio.CancelledError) and request is not None:
            request.uncancel()
            raise ClientGone("the client disconnected before the response") from None

    def _start(self) -> None:
        self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        if self._request is not None:
            self._request.cancel()
