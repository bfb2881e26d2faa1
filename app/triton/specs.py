"""Read the specs of a Triton's models, and keep them."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import NamedTuple

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.reference import split_reference
from app.model.spec import ModelSpec, are_interchangeable, from_triton_config
from app.resilience.single_flight import SingleFlight
from app.triton.client import TritonClient
from app.triton.server_info import ModelState
from app.triton.status import ModelReplaced

# Answers tell that a model has another version, and connections that Triton was restarted, but nothing tells that Triton has loaded
# the same version with another config.
_KEEP_SECONDS = 5.0
# Whoever asks for a model that is not there again and again costs Triton nothing meanwhile.
_ABSENT_SECONDS, _MAX_ABSENT = 1.0, 1000


class _Known(NamedTuple):
    """What is known of a model."""

    spec: ModelSpec
    connection: int
    """The connection to Triton over which its config came."""
    until: float
    """When to read it again, as `time.monotonic` counts."""


class SpecCache:
    """Specs of models by reference, read again every few seconds. No request waits for that; `confirm` tells whether its spec fits.

    While Triton is not available what is known stays in use.
    """

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._specs: dict[str, _Known] = {}
        self._absent: dict[str, tuple[GatewayError, float]] = {}
        """Errors of models that are not there, and until when they need not be asked for again."""
        self._had: set[str] = set()
        """Names of models that Triton had once, in any version."""
        self._reading: SingleFlight[ModelSpec] = SingleFlight()
        self._refreshing: set[asyncio.Task[None]] = set()

    def cached(self, model: str) -> ModelSpec | None:
        """Return the spec of a model, if it is known."""
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
        """Return the spec of a model; read it if it is not known.

        Raises:
            UnknownModel, ModelNotReady, TritonUnavailable: As `TritonClient.read_config` says. A model that Triton had, or has in
                its repository, is not unknown: it was unloaded, could not be loaded, or Triton is being stopped.
            UnknownVersion: The model is there in other versions only.
            UnsupportedModel: The model's tensors match no supported head.
        """
        spec = self.cached(model)
        if spec is not None:
            return spec
        absent, until = self._absent.get(model, (None, 0.0))
        if absent is not None and monotonic() < until:
            raise copy(absent)
        try:
            return await self._reading.run(model, lambda: self._read(model))
        except (UnknownModel, UnknownVersion) as error:
            if len(self._absent) >= _MAX_ABSENT:
                self._absent.clear()
            self._absent[model] = copy(error), monotonic() + _ABSENT_SECONDS
            raise

    async def confirm(self, spec: ModelSpec, version: str) -> None:
        """Check that an answer is of the model that its request was made for; read the model's spec again if it may not be.

        Args:
            spec: The request was made with it.
            version: The version that has answered.

        Raises:
            ModelReplaced: The answer is of another model.
            GatewayError: As for `get`.
        """
        known = self._specs.get(spec.reference)
        is_current = known is not None and known.connection == self._client.connection
        own = known.spec if known is not None else spec
        if not is_current or version != own.version:
            own = await self._reading.run(spec.reference, lambda: self._read(spec.reference))
        if own.version not in {"", version} or (own is not spec and not are_interchangeable(own, spec)):
            raise ModelReplaced("the model is being replaced by another one")

    @property
    def models(self) -> Collection[str]:
        """Models whose spec is known."""
        return self._specs.keys()

    def has(self, model: str) -> bool:
        """Return whether the spec of a model is known."""
        return model in self._specs

    def known(self, spec: ModelSpec) -> ModelSpec:
        """Return this Triton's own spec of a model; the given one if it is not known."""
        known = self._specs.get(spec.reference)
        return spec if known is None else known.spec

    def has_had(self, model: str) -> bool:
        """Return whether Triton has, or had, a model of this name."""
        return model in self._had

    def forget(self, model: str) -> None:
        """Read the spec again before the next request: an inference failed, so the model may have changed."""
        self._specs.pop(model, None)

    def expire(self, model: str) -> None:
        """Read the spec again, without having any request wait for it: Triton may have a newer version, which fails."""
        if model in self._specs:
            self._specs[model] = self._specs[model]._replace(until=0.0)

    async def _refresh(self, model: str) -> None:
        try:
            await self._reading.run(model, lambda: self._read(model))
        except TritonUnavailable:
            pass
        except GatewayError:  # for the next request to find out
            self.forget(model)

    async def _read(self, model: str) -> ModelSpec:
        name, version = split_reference(model)
        try:
            spec = from_triton_config(*await self._client.read_config(model), is_pinned=bool(version))
        except UnknownModel as error:
            if name in self._had:
                raise ModelNotReady("the model is not loaded any more") from error
            states = await self._list_models()
            if name in states:
                raise ModelNotReady("Triton could not load the model; its log says why") from error
            error.models = sorted(other for other, state in states.items() if state.is_ready)
            raise
        self._had.add(name)
        known = self.known(spec)
        spec = known if known == spec else spec  # images go together if theirs is the same object
        self._specs[model] = _Known(spec, self._client.connection, monotonic() + _KEEP_SECONDS)
        return spec

    async def _list_models(self) -> dict[str, ModelState]:
        with suppress(GatewayError):  # Triton may not tell
            return await self._client.list_models()
        return {}
