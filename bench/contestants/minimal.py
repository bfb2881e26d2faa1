"""The minimal server: reads the body and sends a constant response. Granian runs it, as it runs Nereid.

With a Triton at BENCH_TRITON it also sends each body to `null_file` with Nereid's own client and shared memory: no framework, no
check of the image, no decoding of the result, no log.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from granian import Granian
from granian.constants import HTTPModes, Interfaces, Loops
from granian.log import LogLevels

from app.resilience.lease import Lease
from app.triton.client import TritonClient
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.regions import Regions
from app.triton.specs import SpecCache
from app.triton.transport import Transport

_BODY = b'{"detections":[],"num_detections":0,"status":"success"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
_MODEL = "null_file"
_SECONDS = 10.0

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Forwarder:
    """One worker's connection to Triton."""

    def __init__(self, address: str) -> None:
        """Connect to a gRPC endpoint."""
        self._client = TritonClient(address)
        self._specs = SpecCache(self._client)
        self._transport = Transport("shm", Regions(self._client))

    async def forward(self, body: bytes) -> None:
        """Run one inference."""
        spec = await self._specs.get(_MODEL)
        await self._transport.prepare(spec.image_bytes)
        with Lease() as lease:
            tensor, slot = self._transport.allocate((bytes_element_size(body),), np.uint8, spec.image_bytes, lease)
            write_bytes_element(body, tensor)
            await self._client.infer(spec, [tensor], timeout_seconds=_SECONDS, request_id="bench", slot=slot)

    async def close(self) -> None:
        """Remove the shared memory, here and in Triton."""
        await self._transport.close()
        await self._client.close()


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
        if self._forwarder and scope["method"] == "POST":
            await self._forwarder.forward(b"".join((*chunks, message["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if address := os.environ.get("BENCH_TRITON"):
            self._forwarder = Forwarder(address)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._forwarder:
            await self._forwarder.close()
        await send({"type": "lifespan.shutdown.complete"})


app = App()

if __name__ == "__main__":
    Granian(
        f"{__spec__.name}:app",
        port=int(sys.argv[1]),
        workers=int(sys.argv[2]),
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        loop=Loops.uvloop,
        log_level=LogLevels.warning,
    ).serve()
