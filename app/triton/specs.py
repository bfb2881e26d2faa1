"""Read the specs of a Triton's models, and keep them for a minute."""

from time import monotonic

from app.model.spec import ModelSpec, from_triton_config
from app.resilience.single_flight import SingleFlight
from app.triton.client import TritonClient

_KEEP_SECONDS = 60.0


class SpecCache:
    """Specs by model. They are read again after a minute, because a restart of Triton may change a model unnoticed."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._specs: dict[str, tuple[ModelSpec, float]] = {}
        """Spec of each model, and when to read it again."""
        self._reading: SingleFlight[ModelSpec] = SingleFlight()

    def cached(self, model: str) -> ModelSpec | None:
        """Return the spec of a model, if it was read within the last minute."""
        spec, until = self._specs.get(model, (None, 0.0))
        return spec if monotonic() < until else None

    async def get(self, model: str) -> ModelSpec:
        """Return the spec of a model; read it if necessary.

        Raises:
            UnknownModel, ModelNotReady, TritonUnavailable: As `TritonClient.read_config` says.
            UnsupportedModel: No adapter fits the model.
        """
        return self.cached(model) or await self._reading.run(model, lambda: self._read(model))

    def forget(self, model: str) -> None:
        """Read the spec again before the next request: an inference failed, so the model may have changed."""
        self._specs.pop(model, None)

    async def _read(self, model: str) -> ModelSpec:
        spec = from_triton_config(*await self._client.read_config(model))
        self._specs[model] = spec, monotonic() + _KEEP_SECONDS
        return spec
