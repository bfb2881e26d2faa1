"""One Triton in use: its client, its models and their specs, and its mapped arenas."""

import asyncio
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import structlog

from app.errors import GatewayError
from app.model.spec import ModelSpec, are_interchangeable
from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.model_on_server import ModelOnServer
from app.triton.regions import Regions
from app.triton.silence import Silence
from app.triton.specs import Completion, SpecCache

# Interval of checks for models that Triton did not have.
_LOOK_AGAIN_SECONDS = 5.0
_MEMORY = 0.5

LOG = structlog.get_logger()


class _Comparison(NamedTuple):
    own: ModelSpec
    other: ModelSpec
    is_same: bool


class TritonBackend:
    """One Triton, with what this worker knows about it as a whole."""

    def __init__(self, client: TritonClient, table: WorkerTable, completion: Completion | None = None) -> None:
        self.client = client
        self.table = table
        self.silence = Silence(client, table)
        self.specs = SpecCache(client, completion)
        self.regions = Regions(client)
        self.new_images = 0
        """Images sent to this Triton that `take_new_images` has not returned yet."""
        self.recent_images = 0.0
        """Images sent to this Triton recently; older images count less."""
        self.models: dict[str, ModelOnServer] = {}
        """States of the models that were called here, by reference."""
        self._look_at: dict[str, float] = {}
        """When to look again for a model that Triton did not have, on the `time.monotonic` clock; by reference."""
        self._compared: dict[str, _Comparison] = {}

    @property
    def address(self) -> str:
        """`host:port` or `unix:/path` of the gRPC endpoint."""
        return self.client.address

    def takes(self, spec: ModelSpec) -> bool:
        """Return whether this Triton has the model with the same inputs and outputs, as far as is known."""
        own = self.specs.cached(spec.reference)
        if own is None or own is spec:
            return own is not None
        last = self._compared.get(spec.reference)
        if last is None or last.own is not own or last.other is not spec:
            is_same = are_interchangeable(own, spec)
            if not is_same and (last is None or last.is_same):
                LOG.warning("a model has another input or other outputs here; not used", triton=self.address, model=spec.reference)
            last = self._compared[spec.reference] = _Comparison(own, spec, is_same)
        return last.is_same

    def forget(self, model: str) -> None:
        """Forget the spec of a model after a failed inference: the model may have changed."""
        self.specs.forget(model)
        self._look_at.pop(model, None)

    def is_due(self, model: str) -> bool:
        """Return whether to look for a model: its spec is not known, Triton is connected and was not asked recently."""
        return self.client.server is not None and not self.specs.has(model) and monotonic() >= self._look_at.get(model, 0.0)

    async def look_for(self, model: str) -> None:
        """Read the spec of a model, if Triton has it."""
        self._look_at[model] = monotonic() + _LOOK_AGAIN_SECONDS
        with suppress(GatewayError):
            await self.specs.get(model)

    def take_new_images(self) -> int:
        """Return the number of images sent since the last call, and add it to `recent_images`."""
        taken, self.new_images = self.new_images, 0
        self.recent_images += taken
        return taken

    def forget_images(self) -> None:
        """Reduce the weight of older images; to be called once a second."""
        self.recent_images *= _MEMORY

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

    def is_wrong(self, model: str) -> bool:
        """Return whether this Triton answers for a model, but wrongly, as far as is known."""
        return model in self.models and self.models[model].is_wrong

    async def stop_probing(self) -> None:
        """Stop asking whether Triton answers, and stop probing its models."""
        await self.silence.stop()
        await asyncio.gather(*(served.circuit.close() for served in self.models.values() if served.circuit is not None))

    async def close(self) -> None:
        """Stop probing, and close the connections."""
        await self.stop_probing()
        self.specs.stop()
        await self.client.close()
