"""Which model answers a request for a route: a share goes to the canary, and the fallback answers while the default cannot."""

from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import NamedTuple

import structlog

from app.errors import (
    CircuitOpen,
    GatewayError,
    InvalidParameter,
    ModelNotReady,
    UnknownModel,
    UnknownVersion,
    UnsupportedModel,
    WrongTask,
)
from app.model.reference import refer_to, split_reference
from app.pipeline.call import CallContext, Question, Result
from app.pipeline.hooks import Attempt
from app.pipeline.pipeline import Pipeline
from app.routing.canary import CanaryWatch
from app.routing.route import Route
from app.routing.routes import Routes
from app.routing.shadow import Shadows
from app.telemetry.metrics import Metrics
from app.telemetry.timing import CACHE

_ABOUT_MODELS = (UnknownModel, UnknownVersion, UnsupportedModel, ModelNotReady, WrongTask)
_SERVER_ERROR = 500
_UNITS = 10**9  # the precision of shares

LOG = structlog.get_logger()


class Router:
    """Chooses between the models of routes. A route has precedence over a model of the same name."""

    def __init__(self, routes: Routes, pipeline: Pipeline, metrics: Metrics, canaries: CanaryWatch, shadows: Shadows) -> None:
        """Choose between models of the pipeline."""
        self.routes, self.canaries, self.shadows = routes, canaries, shadows
        self.pipeline = pipeline
        self.requests = metrics.route_requests
        self._counts: Counter[str] = Counter()
        """Requests of this worker without a key, by route."""
        self._checked: object = None
        """The routes whose names were compared with those of models."""

    def handles(self, name: str) -> bool:
        """Return whether a name is that of a route."""
        return name in self.routes.known

    def target(self, name: str, version: int | str | None) -> str:
        """Return the reference of the model, in a version, for which a name stands now; that of no route stands for itself."""
        route = self.routes.known.get(name)
        if route is None or version:
            return refer_to(name if route is None else split_reference(route.to)[0], version)
        return self.default(name, route).model

    def choose(self, name: str, version: int | None, call: CallContext) -> "Choice | None":
        """Choose a model for a request, or for a batch; return None for a name that is no route."""
        route = self.routes.known.get(name)
        if route is None:
            return None
        if version is not None:
            return Choice(self, name, route, "pinned", refer_to(split_reference(route.to)[0], version))
        canary = None if self.canaries.withdrawn(name, route) else route.canary
        if canary is not None and self._is_in_share(name, canary.share, call.route_key):
            return Choice(self, name, route, "canary", canary.to)
        return self.default(name, route)

    def default(self, name: str, route: Route) -> "Choice":
        """Choose the model for requests that do not go to the canary."""
        if route.fallback and not self.is_usable(route.to):
            return Choice(self, name, route, "fallback", route.fallback)
        return Choice(self, name, route, "default", route.to)

    def is_usable(self, model: str) -> bool:
        """Return whether the circuit of a model is closed."""
        return self.pipeline.tritons.is_usable(self.pipeline.refer_to(*split_reference(model)))

    async def refresh(self) -> None:
        """Follow the file without requests, and warn of models with the names of routes. Call this about once a second."""
        await self.canaries.refresh()
        if (known := self.routes.known) is self._checked:
            return
        self._checked = known
        with suppress(GatewayError):  # it is not asked again, because this may take seconds
            for name in known.keys() & await self.pipeline.tritons.list_models():
                LOG.warning("a route has the name of a model, which no request reaches", route=name)

    def _is_in_share(self, name: str, share: float, key: str) -> bool:
        """Return whether a request goes to the canary: with a key by its hash, without one after `n` requests `n * share` did."""
        units = round(share * _UNITS)
        if key:
            digest = blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
            return int.from_bytes(digest) * _UNITS < units << 64
        self._counts[name] += 1
        count = self._counts[name]
        return count * units // _UNITS > (count - 1) * units // _UNITS


class Choice(NamedTuple):
    """The model that a route has chosen for a request, or for the images of a batch."""

    router: Router
    name: str
    route: Route
    part: str
    """`default`, `canary`, `fallback`, or `pinned` to the version that the request names."""
    model: str
    """Reference of the model."""

    async def run(self, data: bytes, question: Question[Result], call: CallContext, attempt: Attempt[Result]) -> Result:
        """Answer a question by the chosen model, or by another one of the route if that fails.

        Raises the errors of `attempt`; those about the model name the route.
        """
        try:
            return await self._attempt(data, question, call, attempt)
        except GatewayError as error:
            following = self._after(error) if call.deadline.remaining > 0 else None
            if following is None and isinstance(error, _ABOUT_MODELS):
                raise type(error)(f"{self.name} stands for {self.model}: {error.detail}") from None
            if following is None:
                raise
        return await following.run(data, question, call, attempt)

    async def _attempt(self, data: bytes, question: Question[Result], call: CallContext, attempt: Attempt[Result]) -> Result:
        """Answer a question by the chosen model, and record this."""
        model, version = split_reference(self.model)
        began = monotonic()
        try:
            found = await attempt(self.router.pipeline.refer_to(model, version), call.pinned_to(int(version) if version else None))
        except GatewayError as error:
            self._record(monotonic() - began, call, error)
            raise
        self._record(monotonic() - began, call)
        if self.route.shadow is not None and self.part == "default":  # with which it is compared
            self.router.shadows.offer(self.name, self.route, data, question, call, found)
        return found

    def _record(self, seconds: float, call: CallContext, error: GatewayError | None = None) -> None:
        router, name, route, part, model = self
        router.requests.add(1, name, model, part, str(error.status if error else 200))
        is_hit = call.timing.description(CACHE) == "hit"  # by which a model is not measured; the default may have more of them
        if route.canary is not None and part in {"default", "canary"} and not is_hit and (error is None or _is_failure(error)):
            router.canaries.note(name, route, is_canary=part == "canary", seconds=seconds, failed=error is not None)

    def _after(self, error: GatewayError) -> "Choice | None":
        """Return what answers after an error; None if nothing does."""
        router, name, route, part, _ = self
        # A canary may also lack what a request asks for, and the default have it.
        if part == "canary" and (_is_failure(error) or isinstance(error, InvalidParameter | WrongTask)):
            return router.default(name, route)
        if part == "default" and route.fallback and (isinstance(error, CircuitOpen) or not router.is_usable(route.to)):
            return self._replace(part="fallback", model=route.fallback)
        return None


def _is_failure(error: GatewayError) -> bool:
    """Return whether an error is one of the model or its Triton."""
    return error.status >= _SERVER_ERROR or isinstance(error, UnknownModel | UnknownVersion)
