"""The minimal server: reads the body and sends a constant response. Granian runs it, as it runs Nereid.

With a Triton at BENCH_TRITON it also sends each body to `null_file` with Nereid's own client: no framework, no check of the
image, no decoding of the result, no log.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

_BODY = b'{"detections":[],"num_detections":0,"status":"success"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Forwarder(Protocol):
    """Passes bodies on."""

    async def forward(self, body: bytes) -> None:
        """Pass a body on, and wait for the response."""

    async def close(self) -> None:
        """Release its resources."""


class App:
    """One worker."""

    def __init__(self) -> None:
        self._forwarder: Forwarder | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        chunks = []
        while (message := await receive()).get("more_body"):
            chunks.append(message["body"])
        if self._forwarder is not None and scope["method"] == "POST":
            await self._forwarder.forward(b"".join((*chunks, message["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if address := os.environ.get("BENCH_TRITON"):
            # Imported here, because it is not needed for HTTP alone.
            from bench.contestants.forwarding import TritonForwarder  # noqa: PLC0415

            self._forwarder = TritonForwarder(address)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._forwarder is not None:
            await self._forwarder.close()
        await send({"type": "lifespan.shutdown.complete"})


app = App()


def main(port: int, workers: int) -> None:
    """Serve until a stop signal."""
    # Imported here, because the application itself does not need it.
    from granian import Granian  # noqa: PLC0415
    from granian.constants import HTTPModes, Interfaces, Loops  # noqa: PLC0415
    from granian.log import LogLevels  # noqa: PLC0415

    Granian(
        "bench.contestants.http_only:app",
        port=port,
        workers=workers,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        loop=Loops.uvloop,
        log_level=LogLevels.warning,
    ).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
