"""The checks before Litestar is called: which route has the path, and whether the gateway is full."""

from litestar.enums import HttpMethod, ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from app.api.admission import guards
from app.api.answering import problems
from app.api.answering.problems import WriteError
from app.api.caller.check import note_key
from app.api.context import context_of, header_of
from app.api.dependencies import WorkerResources
from app.api.routes import ModelRoute, RouteTable, note_route
from app.errors import GatewayFull, MalformedRequest


class DispatchMiddleware:
    """Routes the paths of dialects, and rejects requests that are malformed or cannot be admitted now.

    Under overload most requests are rejected. Rejecting them here is cheaper than running Litestar's routing, guards and error
    handlers. Admission checks the accepted requests again.
    """

    def __init__(self, app: ASGIApp, table: RouteTable, worker: WorkerResources, write_error: WriteError) -> None:
        self.app = app
        self._table = table
        self._worker = worker
        self._write_error = write_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] == ScopeType.HTTP:
            try:
                await self._check(scope)
            except (MalformedRequest, GatewayFull) as error:
                await problems.send(error, scope, send, self._write_error)
                return
        await self.app(scope, receive, send)

    async def _check(self, scope: HTTPScope) -> None:
        if len(scope["path"]) > guards.MAX_PATH or (found := self._table.find(scope)) is None:
            guards.check_framing(scope)
            return
        target, path_values = found
        scope["path"] = target.prefix + scope["path"]
        note_route(scope, target.template)
        guards.check_framing(scope)
        if isinstance(target.handler, ModelRoute) and scope["method"] == HttpMethod.POST:
            context = context_of(scope)
            context.has_model_route = True
            note_key(scope, target.handler, self._worker.keys)
            if self._worker.keys is None or context.scopes is not None:  # without a valid key, reveal nothing about a model
                model = guards.note_model(scope, target.handler, path_values, self._worker)
                await guards.check_capacity(scope, target.handler, model, self._worker)
            elif context.is_anonymous:
                length = int(header_of(scope, b"content-length") or "0")
                await self._worker.pipeline.admission.anonymous_uploads.check(context.client_address, length)
