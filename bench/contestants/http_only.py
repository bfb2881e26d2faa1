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


class App:
    """One worker."""

    def __init__(self) -> None:
        self._pass_on: Callable[[bytes], Awaitable[None]] | None = None

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        chunks = []
        while (message := await receive()).get("more_body"):
            chunks.append(message["body"])
        if (address := os.environ.get("BENCH_TRITON")) and scope["method"] == "POST":
            self._pass_on = self._pass_on or _client(address)
            await self._pass_on(b"".join((*chunks, message["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})


def _client(address: str) -> Callable[[bytes], Awaitable[None]]:
    # Imported here: HTTP alone needs none of it.
    import numpy as np  # noqa: PLC0415

    from app import tensors  # noqa: PLC0415
    from app.transport import Transport  # noqa: PLC0415
    from app.triton import Triton  # noqa: PLC0415

    triton = Triton(address)
    transport = Transport(triton, "shm")

    async def pass_on(body: bytes) -> None:
        model = await triton.contract(_MODEL)
        await transport.prepare(model.input_bytes)
        slot = transport.take(model.input_bytes)
        tensor = tensors.of_file(body, None if slot is None else slot.array((model.input_bytes,), np.uint8))
        await triton.infer(model, tensor, 10, "id", slot)

    return pass_on


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
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        loop=Loops.uvloop,
        log_level=LogLevels.warning,
    ).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
