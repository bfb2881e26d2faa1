"""Runs an ASGI application without a server. Needs only the standard library and uvloop."""

import asyncio
import atexit
from typing import Any

import uvloop

_BODY = bytes(150_000)
_HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"image/jpeg"), (b"content-length", b"%d" % len(_BODY))]
_REQUEST = {"type": "http.request", "body": _BODY, "more_body": False}
_SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/detect",
    "raw_path": b"/detect",
    "root_path": "",
    "query_string": b"",
    "headers": _HEADERS,
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}
_OK = 200


class AsgiRunner:
    """Runs one application on a separate event loop until this process ends."""

    def __init__(self, application: Any) -> None:  # noqa: ANN401 - any ASGI application
        """Start the application's lifespan."""
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self._application = application
        self._to_app: asyncio.Queue[Any] = asyncio.Queue()
        self._from_app: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        self._lifespan = self.loop.create_task(application(scope, self._to_app.get, self._from_app.put))
        self.loop.run_until_complete(self._start())
        atexit.register(lambda: self.loop.run_until_complete(self._stop()))

    def send_request(self, _: Any) -> None:  # noqa: ANN401 - a step's argument
        """Post a body with the size of an image, and receive the response."""
        self.loop.run_until_complete(self._send_request())

    async def _send_request(self) -> None:
        sent: list[Any] = []

        async def receive() -> Any:  # noqa: ANN401
            return _REQUEST

        async def send(message: Any) -> None:  # noqa: ANN401
            sent.append(message)

        await self._application({**_SCOPE, "state": {}}, receive, send)
        if sent[0]["status"] != _OK:
            raise RuntimeError(sent)

    async def _start(self) -> None:
        await self._to_app.put({"type": "lifespan.startup"})
        if (message := await self._from_app.get())["type"] != "lifespan.startup.complete":
            raise RuntimeError(message)

    async def _stop(self) -> None:
        await self._to_app.put({"type": "lifespan.shutdown"})
        await self._lifespan
