"""Cache of the specs of a Triton's models."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import Any, NamedTuple

import msgspec
import structlog

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.reference import refer_to, split_reference
from app.model.spec import ModelSpec, are_interchangeable, from_triton_config
from app.resilience.single_flight import SingleFlight
from app.triton.client import TritonClient
from app.triton.server_info import ModelState
from app.triton.status import ModelReplaced

# Answers reveal another version of a model, and connections a restart of Triton. Nothing reveals that Triton has loaded the same
# version with another config.
_KEEP_SECONDS = 5.0
# For how long, and for how many models, an error is repeated without a call to Triton.
_ABSENT_SECONDS, _MAX_ABSENT = 1.0, 1000

LOG = structlog.get_logger()


class _Known(NamedTuple):
    spec: ModelSpec
    connection: int
    """Number of the connection over which the config was read."""
    until: float
    """When to read the config again, on the `time.monotonic` clock."""


class Completion(NamedTuple):
    """What is found out of models whose configs leave it open, and what the settings say of all."""

    name_classes: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns a config with the class names that lie beside it; it may block."""
    decide_units: Callable[[TritonClient, ModelSpec], Awaitable[ModelSpec]]
    """Returns the spec with the unit of its boxes; raises GatewayError if the model cannot answer now."""
    is_square: bool = False
    """Whether no model gets images in its `shapes`."""


class SpecCache:
    """Specs of models by reference, read again every few seconds in the background, and kept while Triton is not available."""

    def __init__(self, client: TritonClient, completion: Completion | None = None) -> None:
        self._client = client
        self._completion = completion
        self._decided: dict[str, tuple[ModelSpec, int, ModelSpec]] = {}
        """By reference the spec of the config, the number of the connection, and the spec with the unit of its boxes."""
        self._specs: dict[str, _Known] = {}
        self._absent: dict[str, tuple[GatewayError, float]] = {}
        """Errors for models that Triton does not have, and until when they are repeated."""
        self._had: set[str] = set()
        """Names of models that Triton has or had, in any version."""
        self._reading: SingleFlight[ModelSpec] = SingleFlight()
        self._refreshing: set[asyncio.Task[None]] = set()

    def cached(self, model: str) -> ModelSpec | None:
        """Return the spec of a model; None if it is not known. An old spec is read again in the background."""
        known = self._specs.get(model)
        if known is None:
            return None
        if monotonic() > known.until:
            self._specs[model] = known._replace(until=monotonic() + _KEEP_SECONDS)
            task = asyncio.create_task(self._refresh(model))
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)
        return known.spec

    async def get(self, model: str) -> ModelSpec:
        """Return the spec of a model; read it if it is not known. Raises UnsupportedModel, or as `TritonClient.read_config`."""
        spec = self.cached(model)
        if spec is not None:
            return spec
        absent, until = self._absent.get(model, (None, 0.0))
        if absent is not None and monotonic() < until:
            raise copy(absent)
        try:
            return await self.read(model)
        except (UnknownModel, UnknownVersion) as error:
            if len(self._absent) >= _MAX_ABSENT:
                self._absent.clear()
            self._absent[model] = copy(error), monotonic() + _ABSENT_SECONDS
            raise

    async def read(self, model: str) -> ModelSpec:
        """Read the spec of a model now; errors are those of `get`."""
        return await self._reading.run(model, lambda: self._read(model))

    async def confirm(self, spec: ModelSpec, version: str) -> None:
        """Raise ModelReplaced if the version that answered is of another model than the spec; if in doubt, read the spec again."""
        known = self._specs.get(spec.reference)
        is_current = known is not None and known.connection == self._client.connection
        own = known.spec if known is not None else spec
        if not is_current or version != own.version:
            own = await self.read(spec.reference)
        if own.version not in {"", version} or (own is not spec and not are_interchangeable(own, spec)):
            raise ModelReplaced("the model is being replaced by another one")

    @property
    def models(self) -> Collection[str]:
        """References of the models whose specs are known."""
        return self._specs.keys()

    def peek(self, model: str) -> ModelSpec | None:
        """Return the spec of a model as `cached` does, but do not read it again."""
        known = self._specs.get(model)
        return None if known is None else known.spec

    def has(self, model: str) -> bool:
        """Return whether the spec of a model is known."""
        return model in self._specs

    def known(self, spec: ModelSpec) -> ModelSpec:
        """Return this Triton's own spec of the same model; the given one if it is not known."""
        known = self._specs.get(spec.reference)
        return spec if known is None else known.spec

    def has_had(self, model: str) -> bool:
        """Return whether Triton has or had a model of this name."""
        return model in self._had

    def forget(self, model: str) -> None:
        """Forget a spec after a failed inference: the model may have changed."""
        for name in self._meaning(model):
            del self._specs[name]

    def forget_all(self, name: str) -> None:
        """Forget what is known of all versions of a model, also that Triton did not have them."""
        for known in (self._specs, self._absent):
            for reference in [reference for reference in known if split_reference(reference)[0] == name]:
                del known[reference]

    def expire(self, model: str) -> None:
        """Read a spec again in the background when it is next used: Triton may have loaded a newer version that fails."""
        for name in self._meaning(model):
            self._specs[name] = self._specs[name]._replace(until=0.0)

    def stop(self) -> None:
        """Stop reading specs again."""
        for task in self._refreshing:
            task.cancel()

    def _meaning(self, model: str) -> list[str]:
        return [name for name, known in self._specs.items() if model in {name, known.spec.reference}]

    async def _decide(self, spec: ModelSpec, completion: Completion) -> ModelSpec:
        own, connection, decided = self._decided.get(spec.reference, (None, 0, spec))
        if own == spec and connection == self._client.connection:
            return decided
        try:
            decided = await completion.decide_units(self._client, spec)
        except GatewayError:  # it is asked again when its config is read again
            if own is None or not are_interchangeable(own, spec):  # no answer is better than boxes in a wrong unit
                raise
            return msgspec.structs.replace(spec, head=decided.head, box_units=decided.box_units, doubt=decided.doubt)
        self._decided[spec.reference] = spec, self._client.connection, decided
        if decided.doubt:
            LOG.warning("the rows of a model are not of its head", model=spec.reference, reason=decided.doubt)
        elif decided.box_units is None:
            LOG.warning("nothing tells the unit of a model's boxes; pixels are assumed", model=spec.reference)
        else:
            LOG.info("the rows of a model tell the unit of its boxes", model=spec.reference, box_units=decided.box_units)
        return decided

    async def _refresh(self, model: str) -> None:
        try:
            await self.read(model)
        except TritonUnavailable:
            pass
        except GatewayError:  # the next request gets the error
            self.forget(model)

    async def _read(self, model: str) -> ModelSpec:
        name, version = split_reference(model)
        try:
            config, newest = await self._client.read_config(model)
            if self._completion is not None:
                config = await asyncio.to_thread(self._completion.name_classes, config)
            spec = from_triton_config(config, newest, is_pinned=bool(version))
            if self._completion is not None and self._completion.is_square:
                spec = msgspec.structs.replace(spec, shapes=())
            if spec.default_version and not version:
                spec = await self._read(refer_to(name, spec.default_version))
            elif spec.box_units is None and self._completion is not None:
                spec = await self._decide(spec, self._completion)
        except UnknownModel as error:
            states: dict[str, ModelState] | None = None
            with suppress(GatewayError):  # Triton may restrict its repository
                states = await self._client.list_models()
            if name in (self._had if states is None else states):
                if name in self._had:
                    raise ModelNotReady("the model is not loaded any more") from error
                raise ModelNotReady("Triton could not load the model; its log says why") from error
            error.models = sorted(other for other, state in (states or {}).items() if state.is_ready)
            raise
        self._had.add(name)
        known = self.known(spec)
        spec = known if known == spec else spec  # only images with the same spec object share a batch
        self._specs[model] = _Known(spec, self._client.connection, monotonic() + _KEEP_SECONDS)
        return spec
