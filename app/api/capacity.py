"""Reject requests for detection while the gateway is full, before their body is received."""

from urllib.parse import parse_qs

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from app.api import problems
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.keys import ApiKeys
from app.api.parameters import MODEL_NAMES
from app.errors import GatewayFull, Unauthorized
from app.resilience.admission import WHOLE, Share

_PREDICT = "/predict/"


class CapacityMiddleware:
    """Checks requests for detection before Litestar sees them.

    Under overload most requests are rejected, and what that costs is missing to the others: as a guard of Litestar, this
    check would make a rejection three times as expensive. Whatever it lets through is checked again by admission.
    """

    def __init__(self, app: ASGIApp, resources: WorkerResources, keys: ApiKeys | None) -> None:
        self.app = app
        self._resources = resources
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] == ScopeType.HTTP and scope["method"] == "POST":
            path = scope["path"].removeprefix("/v1")
            if path == "/detect" or path.startswith(_PREDICT):
                try:
                    await self._check(scope, path)
                except GatewayFull as error:
                    await problems.send(error, scope, send)
                    return
                except Unauthorized:
                    pass  # left to the guard
        await self.app(scope, receive, send)

    async def _check(self, scope: HTTPScope, path: str) -> None:
        """Check by the model in the path, in the query, or the default one; one that the body names is known later."""
        detector = self._resources.detector
        query = scope["query_string"]
        if path.startswith(_PREDICT):
            model = path.removeprefix(_PREDICT)
        elif b"model" in query:
            named = parse_qs(query.decode("latin-1"))
            model = next((named[name][0] for name in MODEL_NAMES if name in named), detector.default_model)
        else:
            model = detector.default_model
        await detector.admission.check(model, self._share(scope))

    def _share(self, scope: HTTPScope) -> Share:
        """Find out what part of the limit the request may use, by its API key, and set it in its context."""
        if self._keys is None:
            return WHOLE
        key = self._keys.identify(scope["headers"])
        context = context_of(scope)
        context.log_fields["key"] = key.id
        context.share = self._keys.share_of(key)
        return context.share
