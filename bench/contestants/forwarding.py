"""Sends encoded images to a model in Triton through shared memory, with only Nereid's own client."""

import numpy as np

from app.resilience.lease import Lease
from app.triton.client import TritonClient
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.regions import Regions
from app.triton.specs import SpecCache
from app.triton.transport import Transport

_MODEL = "null_file"
_SECONDS = 10.0


class TritonForwarder:
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
