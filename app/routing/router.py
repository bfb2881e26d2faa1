"""Which model answers a request for a route: a share goes to the canary, and the fallback answers while the default cannot."""

from collections import Counter
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import structlog

from app.errors import (
    CircuitOpen,
    DeadlinePassed,
    GatewayError,
    GatewayFull,
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
from app.pipeline.preprocess import Source
from app.resilience.deadline import TurnMissed
from app.routing.canary import CanaryWatch
from app.routing.route import Route, is_in_share, is_key_in_share
from app.routing.routes import Routes
from app.routing.shadow import Shadows
from app.telemetry.metrics import Metrics
from app.triton.status import NotLoadedYet

_ABOUT_MODELS = (UnknownModel, UnknownVersion, UnsupportedModel, ModelNotReady, WrongTask)
_SERVER_ERROR = 500
# A request that its caller gave less than this fraction of the usual time tells nothing of a model that has not answered it.
_PATIENCE = 0.5

LOG = structlog.get_logger()


class Router:
    """Chooses between the models of routes. A route has precedence over a model of the same name."""

    def __init__(self, routes: Routes, pipeline: Pipeline, metrics: Metrics, canaries: CanaryWatch, shadows: Shadows) -> None:
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

    def choose(self, name: str, call: CallContext) -> "Choice | None":
        """Choose a model for a request, or for a batch, that names no version; return None for a name that is no route."""
        route = self.routes.known.get(name)
        if route is None:
            return None
        canary = None if self.canaries.withdrawn(name, route) else route.canary
        if canary is not None and self._is_for_canary(name, canary.share, call.route_key):
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

    def _is_for_canary(self, name: str, share: float, key: str) -> bool:
        if key:
            return is_key_in_share(name, key, share)
        self._counts[name] += 1
        return is_in_share(self._counts[name], share)


class Choice(NamedTuple):
    """The model that a route has chosen for a request, or for the images of a batch."""

    router: Router
    name: str
    route: Route
    part: str
    """`default`, `canary` or `fallback`."""
    model: str
    """Reference of the model."""

    async def run(self, data: Source, question: Question[Result], call: CallContext, attempt: Attempt[Result]) -> Result:
        """Answer a question, as `hooks.Choice` says."""
        model, version = split_reference(self.model)
        call.timing.stages.pop("infer", None)  # that of a model that has failed
        began = monotonic()
        try:
            found = await attempt(*self.router.pipeline.choose(model, int(version) if version else None, call))
        except GatewayError as error:
            self._record(call, monotonic() - began, error)
            following = self._after(error, call)
            if following is None:
                if isinstance(error, _ABOUT_MODELS):
                    raise type(error)(f"{self.name} stands for {self.model}: {error.detail}") from None
                raise
        else:
            self._record(call)
            if self.part == "default" and isinstance(data, bytes):  # a shadow is compared with it, of files only: they can be kept
                self.router.shadows.offer(self.name, self.route, data, question, call, found)
            return found
        return await following.run(data, question, call, attempt)

    def _record(self, call: CallContext, seconds: float = 0.0, error: GatewayError | None = None) -> None:
        """Count a request, which has failed after some seconds if there is an error."""
        router, name, route, part, model = self
        router.requests.add(1, name, model, part, str(error.status if error else 200))
        if route.canary is None or part == "fallback":
            return
        if error is None:
            # An answer from the cache tells nothing of the model. Nor does the time that a large image takes to be decoded.
            if (milliseconds := call.timing.stages.get("infer")) is not None:
                router.canaries.note(name, route, milliseconds / 1e3, is_canary=part == "canary")
        elif isinstance(error, NotLoadedYet | TurnMissed):  # for the first requests, and when others needed the memory
            return
        elif _is_failure(error) and (
            not isinstance(error, DeadlinePassed) or seconds >= _PATIENCE * router.pipeline.limits.timeout_seconds
        ):
            router.canaries.note(name, route, None, is_canary=part == "canary")

    def _after(self, error: GatewayError, call: CallContext) -> "Choice | None":
        """Return what answers after an error; None if nothing does."""
        router, name, route, part, _ = self
        if call.deadline.remaining <= 0:
            return None
        # A canary may also lack what a request asks for, or a place for it. Batches wait for places.
        is_lacking = isinstance(error, InvalidParameter | WrongTask) or (isinstance(error, GatewayFull) and not call.is_batch)
        if part == "canary" and (_is_failure(error) or is_lacking):
            return router.default(name, route)
        if part == "default" and route.fallback and (isinstance(error, CircuitOpen) or not router.is_usable(route.to)):
            return self._replace(part="fallback", model=route.fallback)
        return None


def _is_failure(error: GatewayError) -> bool:
    """Return whether an error is one of the model or its Triton."""
    return error.status >= _SERVER_ERROR or isinstance(error, UnknownModel | UnknownVersion)
