"""Response classes: encoded JSON, large bodies, files."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from app.api.context import PAUSE_SECONDS, RequestContext, context_of
from app.resilience.memory import MemoryBudget

Header = tuple[bytes, bytes]

VARY: Header = b"vary", b"Accept"
_CHUNK_BYTES = 1 << 18


class JsonResponse(ASGIResponse):
    """Sends encoded JSON. Litestar's response, which also handles cookies, background tasks and HEAD, costs about 15 us more."""

    def __init__(self, body: bytes, status: int = 200) -> None:  # deliberately skips the base constructor
        self.body, self._status = body, status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the response."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body)), VARY]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class LargeResponse(ASGIResponse):
    """Sends a body in chunks, within reserved memory: the server would buffer a whole one for a client that does not read."""

    def __init__(  # deliberately skips the base constructor
        self, body: bytes, content_type: str, memory: MemoryBudget, headers: Sequence[Header] = ()
    ) -> None:
        self.body = body
        self._more_headers = headers
        self._content_type = content_type
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send as much as the client receives in time; raise GatewayFull before anything is sent if memory is exhausted."""
        with self._memory.reserve(context_of(scope).caller) as memory:
            memory.add(len(self.body))
            headers = [
                (b"content-type", self._content_type.encode()),
                (b"content-length", b"%d" % len(self.body)),
                VARY,
                *self._more_headers,
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_body(context_of(scope), send)

    async def _send_body(self, context: RequestContext, send: Send) -> None:
        time = asyncio.get_running_loop().time
        end = time() + context.body_limits.total_seconds
        left = len(self.body)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end) as limit:
                for start in range(0, len(self.body), _CHUNK_BYTES):
                    limit.reschedule(min(time() + PAUSE_SECONDS, end))
                    chunk = self.body[start : start + _CHUNK_BYTES]
                    await send({"type": "http.response.body", "body": chunk, "more_body": left > len(chunk)})
                    left -= len(chunk)
        context.is_client_gone = left > 0


class FileResponse:
    """Sends a file. If the server supports `pathsend`, it reads the file in chunks, so a slow client costs no memory."""

    def __init__(self, path: Path, media_type: str, headers: tuple[Header, ...] = ()) -> None:
        self._path = path
        self._headers = [(b"content-type", media_type.encode()), *headers]

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Send the response."""
        length = self._path.stat().st_size
        headers = [*self._headers, (b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if "http.response.pathsend" in (scope.get("extensions") or {}):
            await send({"type": "http.response.pathsend", "path": str(self._path)})  # type: ignore[arg-type]  # an extension
        else:
            await send({"type": "http.response.body", "body": self._path.read_bytes(), "more_body": False})
