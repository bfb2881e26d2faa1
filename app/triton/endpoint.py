"""One Triton as it is reached: what it has, and which arenas it has mapped."""

from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import structlog

from app.errors import GatewayError
from app.model.spec import ModelSpec, are_interchangeable
from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.regions import Regions
from app.triton.silence import Silence
from app.triton.specs import SpecCache

# It may have loaded a model that it did not have.
_LOOK_AGAIN_SECONDS = 5.0
_MEMORY = 0.5

LOG = structlog.get_logger()


class _Comparison(NamedTuple):
    """How a model here compares to that of another Triton, the last time."""

    own: ModelSpec
    other: ModelSpec
    is_same: bool


class Endpoint:
    """One Triton: its client, the specs of its models, which arenas it has mapped, whether it answers, how much was sent to it."""

    def __init__(self, client: TritonClient, table: WorkerTable) -> None:
        self.client = client
        self.table = table
        """Shared by all workers that use this Triton."""
        self.silence = Silence(client, table)
        self.specs = SpecCache(client)
        self.regions = Regions(client)
        self.new_images = 0
        """Images that were sent to it and are not counted yet."""
        self.recent_images = 0.0
        """Images that were sent to it in the last seconds."""
        self._look_at: dict[str, float] = {}
        """When to look for a model again that it did not have, as `time.monotonic` counts."""
        self._compared: dict[str, _Comparison] = {}

    @property
    def address(self) -> str:
        """`host:port` of its gRPC endpoint."""
        return self.client.address

    def takes(self, spec: ModelSpec) -> bool:
        """Return whether it has a model with this input and these outputs, as far as is known."""
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
        """Have a spec read again: an inference failed, so the model may have changed."""
        self.specs.forget(model)
        self._look_at.pop(model, None)

    def is_due(self, model: str) -> bool:
        """Return whether to look for a model: it is not known, Triton is connected, and it was not asked lately."""
        return self.client.server is not None and not self.specs.has(model) and monotonic() >= self._look_at.get(model, 0.0)

    async def look_for(self, model: str) -> None:
        """Read the spec of a model, if it is there."""
        self._look_at[model] = monotonic() + _LOOK_AGAIN_SECONDS
        with suppress(GatewayError):
            await self.specs.get(model)

    def take_new_images(self) -> int:
        """Return how many images were sent to it since the last time."""
        taken, self.new_images = self.new_images, 0
        self.recent_images += taken
        return taken

    def forget_images(self) -> None:
        """Let older images count less; to be called once a second."""
        self.recent_images *= _MEMORY
