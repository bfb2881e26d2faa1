"""One Triton in use, with the state of its models."""

import asyncio

from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.endpoint import Endpoint
from app.triton.model_on_server import ModelOnServer


class TritonBackend(Endpoint):
    """An endpoint, with the state of each model that was called there."""

    def __init__(self, client: TritonClient, table: WorkerTable) -> None:
        super().__init__(client, table)
        self.models: dict[str, ModelOnServer] = {}
        """States of the models, by reference."""

    @property
    def is_busy(self) -> bool:
        """Whether any call is in flight, including unanswered inferences that must not be cancelled."""
        return bool(self.client.left) or any(served.images for served in self.models.values())

    def model(self, reference: str) -> ModelOnServer:
        """Return the state of a model; create it on first use."""
        served = self.models.get(reference)
        if served is None:
            served = self.models[reference] = ModelOnServer(self)
        return served

    def is_usable(self, model: str) -> bool:
        """Return whether this Triton runs a model, as far as is known."""
        return model not in self.models or self.models[model].is_usable

    async def stop_probing(self) -> None:
        """Stop asking whether Triton answers, and stop probing its models."""
        await self.silence.stop()
        await asyncio.gather(*(served.circuit.close() for served in self.models.values() if served.circuit is not None))

    async def close(self) -> None:
        """Stop probing, and close the connections."""
        await self.stop_probing()
        await self.client.close()
