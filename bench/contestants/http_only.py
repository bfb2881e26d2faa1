"""HTTP and nothing else: reads the body, answers the same JSON to everybody. Run by Granian, as Nereid is.

With a Triton at BENCH_TRITON it also passes each body on to `null_file`, by Nereid's own client: no framework, no look at
the file or at what was found, no log.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

_BODY = b'{"detections":[],"num_detections":0,"status":"success"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
_MODEL = "null_file"

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Client:
    """Passes files on to Triton, through shared memory."""

    def __init__(self, address: str) -> None:
        # Imported here: HTTP alone needs none of it.
        from app.transport import Transport  # noqa: PLC0415
        from app.triton import Triton  # noqa: PLC0415

        self._triton = Triton(address)
        self._transport = Transport(self._triton, "shm")

    async def pass_on(self, body: bytes) -> None:
        """Run one inference."""
        import numpy as np  # noqa: PLC0415

        from app import tensors  # noqa: PLC0415

        model = await self._triton.contract(_MODEL)
        await self._transport.prepare(model.input_bytes)
        slot = self._transport.take(model.input_bytes)
        tensor = tensors.of_file(body, None if slot is None else slot.array((model.input_bytes,), np.uint8))
        await self._triton.infer(model, tensor, 10, "id", slot)

    async def close(self) -> None:
        """Leave nothing behind."""
        await self._transport.close()
        await self._triton.close()


class App:
    """One worker."""

    def __init__(self) -> None:
        self._client: Client | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, or live from start to end."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        chunks = []
        while (message := await receive()).get("more_body"):
            chunks.append(message["body"])
        if self._client is not None and scope["method"] == "POST":
            await self._client.pass_on(b"".join((*chunks, message["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        if address := os.environ.get("BENCH_TRITON"):
            self._client = Client(address)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._client is not None:
            await self._client.close()
        await send({"type": "lifespan.shutdown.complete"})


app = App()


def main(port: int, workers: int) -> None:
    """Serve until told to stop."""
    # Imported here: the app itself needs nothing.
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
