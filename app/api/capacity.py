"""Reject requests for models while the gateway is full, before their body is received."""

from urllib.parse import parse_qs

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send
from litestar.utils import normalize_path

from app.api import problems
from app.api.body import needs_parsing
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.keys import ApiKeys
from app.api.parameters import MODEL_NAMES
from app.api.route import note_route
from app.errors import GatewayFull, Unauthorized
from app.model.heads import HEADS, DetectionHead
from app.resilience.admission import WHOLE, Share

_VERSION = "/v1"
_BATCH = "/detect/batch"
_TASKS = {head.route: head.task for head in HEADS} | {_BATCH: DetectionHead.task}
_PATHS = {f"{version}{route}" for version in ("", _VERSION) for route in _TASKS}
_PREDICT = "/predict/"
_PREDICT_TEMPLATE = "/predict/{model}"


class CapacityMiddleware:
    """Checks requests for models before Litestar sees them.

    Under overload most requests are rejected, and what that costs is missing to the others: routing, guards and error handlers
    would cost more than the check. Whatever it lets through is checked again by admission.
    """

    def __init__(self, app: ASGIApp, resources: WorkerResources, keys: ApiKeys | None) -> None:
        self.app = app
        self._resources = resources
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] == ScopeType.HTTP and scope["method"] == "POST":
            try:
                await self._check(scope)
            except GatewayFull as error:
                await problems.send(error, scope, send)
                return
        await self.app(scope, receive, send)

    async def _check(self, scope: HTTPScope) -> None:
        """Check a request for the model in its path, in its query, or the default one; a model in the body is known later.

        So is a version there: if path or query name the model, its newest version is checked until then.
        """
        path = scope["path"]
        if path not in _PATHS:
            path = normalize_path(path)  # as Litestar does
        version = _VERSION if path.startswith(f"{_VERSION}/") else ""
        path = path.removeprefix(version)
        is_predict = path.startswith(_PREDICT) and path.count("/") == _PREDICT.count("/")
        share = self._share(scope) if is_predict or path in _TASKS else None
        if share is None:
            return
        note_route(scope, version + (_PREDICT_TEMPLATE if is_predict else path))
        pipeline = self._resources.pipeline
        query = scope["query_string"]
        values = parse_qs(query.decode("latin-1")) if b"model" in query or b"version" in query else {}
        named = path.removeprefix(_PREDICT) if is_predict else next((values[name][0] for name in MODEL_NAMES if name in values), "")
        pinned = values.get("version", [""])[0]
        name = named or pipeline.default_for(_TASKS.get(path, DetectionHead.task))
        model = pipeline.refer_to(name, pinned)
        context = context_of(scope)
        if named or not needs_parsing(context.content_type):
            context.model = model
            if pipeline.is_known(name):
                context.log_fields["model"] = name
        # While it is open, a guard rejects the request for that. Those that Triton did not answer may have filled the gateway.
        if pipeline.is_usable(model):
            await pipeline.admission.check(model, share, is_batch=path == _BATCH)

    def _share(self, scope: HTTPScope) -> Share | None:
        """Find out what part of the limit the request may use, by its API key; None if the key's guard will reject it."""
        if self._keys is None:
            return WHOLE
        try:
            key = self._keys.identify(scope["headers"])
        except Unauthorized:
            return None
        context_of(scope).log_fields["key"] = key.id
        return self._keys.share_of(key) if "detect" in key.scopes else None
