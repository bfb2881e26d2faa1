"""One Triton of those that the gateway uses, and what it has shown of its models."""

import asyncio

from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.endpoint import Endpoint
from app.triton.model_on_server import ModelOnServer


class TritonBackend(Endpoint):
    """One Triton, and its models as calls have found them."""

    def __init__(self, client: TritonClient, table: WorkerTable) -> None:
        super().__init__(client, table)
        self.models: dict[str, ModelOnServer] = {}
        """What it has shown of the models that it was called for, by reference."""

    @property
    def is_busy(self) -> bool:
        """Whether a call to it is under way, also one that was given up and must not be cancelled."""
        return bool(self.client.left) or any(served.images for served in self.models.values())

    def model(self, reference: str) -> ModelOnServer:
        """Return what it has shown of a model."""
        served = self.models.get(reference)
        if served is None:
            served = self.models[reference] = ModelOnServer(self)
        return served

    def is_usable(self, model: str) -> bool:
        """Return whether it runs a model, as far as is known."""
        return model not in self.models or self.models[model].is_usable

    async def stop_probing(self) -> None:
        """Leave circuits as they are."""
        await self.silence.stop()
        await asyncio.gather(*(served.circuit.close() for served in self.models.values() if served.circuit is not None))

    async def close(self) -> None:
        """Close the connections."""
        await self.stop_probing()
        await self.client.close()
