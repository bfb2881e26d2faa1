"""The HTTP application: assembles routes, dependencies, error handlers and middleware."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Components, SecurityRequirement
from litestar.types import ASGIApp, ControllerRouterHandler, Guard

from app.api import routing
from app.api.admission.cors import CorsMiddleware
from app.api.admission.guards import model_guards
from app.api.admission.middleware import DispatchMiddleware, HeadMiddleware, RequestContextMiddleware
from app.api.answering import problems
from app.api.batch import route as batch
from app.api.caller.check import guard_scope
from app.api.caller.keys import ApiKeys
from app.api.dependencies import Deployment, SearchState, WorkerResources, providers
from app.api.detect import EMBED, ROUTES
from app.api.dialects import dialect
from app.api.dialects.dialect import Dialect
from app.api.documentation import docs
from app.api.documentation.openapi import KEY_SCHEMES
from app.api.documentation.page.routes import page_asset, root
from app.api.pass_on import ask_search
from app.api.reports.health import health, livez, livez_of_triton, ready, readyz
from app.api.reports.instead import instead
from app.api.reports.metrics import metrics
from app.api.reports.models import model, models
from app.api.routes import VERSION, ModelRoute, RouteTable
from app.api.sight import analyze, embed, faces, ocr
from app.cascade.catalog import Catalog
from app.host.connections import end_silent
from app.host.processes import DRAIN_SIGNAL, REPLACE_SIGNAL
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool

if TYPE_CHECKING:  # imports OpenTelemetry, which is optional
    from app.telemetry.tracing import Tracing

_MODEL_ROUTES: dict[str, Sequence[HTTPRouteHandler]] = {
    "detection": [*ROUTES, *batch.ROUTES],
    "text": ocr.ROUTES,
    "faces": faces.ROUTES,
    "vectors": [EMBED, *embed.ROUTES],
    "analysis": analyze.ROUTES,
}

Application = ASGIApp
OpenSearch = Callable[[Pipeline, Catalog, Metrics], AbstractAsyncContextManager[SearchState]]
OpenResources = Callable[[], AbstractAsyncContextManager[tuple[TritonPool, Pipeline, Metrics]]]


def build(
    open_resources: OpenResources,
    deployment: Deployment,
    keys: ApiKeys | None = None,
    tracing: "Tracing | None" = None,
    open_search: OpenSearch | None = None,
) -> Application:
    """Build the application of one worker, whose lifespan can run only once. Without `keys` the API is open."""
    resources = WorkerResources(deployment, keys)
    guards = model_guards(resources)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        if hasattr(resources, "pipeline"):
            raise RuntimeError("this application was started before; build another one")
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_resources())
            resources.tritons, resources.pipeline, resources.metrics = opened
            if open_search is not None:
                opening = open_search(resources.pipeline, resources.catalog, resources.metrics)
                resources.search = await stack.enter_async_context(opening)
            asyncio.get_running_loop().add_signal_handler(DRAIN_SIGNAL, resources.drain)
            asyncio.get_running_loop().add_signal_handler(REPLACE_SIGNAL, resources.leave_to_successor)
            stack.callback(asyncio.create_task(resources.catalog.follow()).cancel)
            if deployment.port:
                stack.callback(asyncio.create_task(end_silent(deployment.port, resources.client_ports.values())).cancel)
            yield

    model_routes: dict[str, Sequence[HTTPRouteHandler]]
    others: list[ControllerRouterHandler]
    if deployment.is_search_alone:
        from app.api.dialects import deepstack_names  # noqa: PLC0415 - workers beside search need none of it
        from app.api.search import routes as search  # noqa: PLC0415

        model_routes, dependencies = {"search": search.MODEL_ROUTES}, {**providers(resources), **search.providers()}
        dialects = [deepstack_names.DIALECT] if deepstack_names.DIALECT.name in deployment.dialects else []
        others = [
            Router("/", route_handlers=[*_secured(search.ROUTES, keys)], guards=[guard_scope(keys, "search")], tags=["search"]),
            *([search.report] if deployment.is_beside else []),
        ]
    else:
        model_routes, dependencies, dialects = _MODEL_ROUTES, providers(resources), dialect.load(deployment.dialects)
        handlers = [*_secured([models, model, routing.routes], keys, "detect")]
        if keys is not None:
            from app.api import admin  # noqa: PLC0415 - without keys, nobody changes models

            handlers += [*admin.ROUTES, *routing.ADMIN_ROUTES]
        others = [Router("/", route_handlers=handlers, guards=[guard_scope(keys, "detect")], tags=["models"]), ask_search]
    routes: list[ControllerRouterHandler] = [
        *(
            Router("/", route_handlers=[*_secured([*_guarded(handlers, guards)], keys)], tags=[subject])
            for subject, handlers in model_routes.items()
        ),
        *others,
        Router(
            "/",
            route_handlers=[health, metrics, ready],
            guards=[guard_scope(keys, "health")],
            security=_security(keys, "health"),
            tags=["health"],
        ),
        Router("/", route_handlers=[livez, livez_of_triton, readyz, root, instead], tags=["health"]),
        *([page_asset] if deployment.has_page else []),
    ]
    write_error = dialect.error_writer(dialects)
    app = Litestar(
        route_handlers=[
            *routes,
            Router(VERSION, route_handlers=routes, include_in_schema=False),
            docs.docs_asset,
            *(
                # Other services document these interfaces, so the OpenAPI document omits them.
                Router(f"/{each.name}", route_handlers=[*_guarded(each.handlers, guards)], include_in_schema=False)
                for each in dialects
            ),
        ],
        dependencies=dependencies,
        exception_handlers=problems.handlers(write_error),
        lifespan=[lifespan],
        state=State({"worker": resources}, deep_copy=False),
        openapi_config=docs.config(Components(security_schemes=KEY_SCHEMES if keys else None)),
        logging_config=None,
    )
    inner: ASGIApp = DispatchMiddleware(
        app, table_of(dialects, [*chain.from_iterable(model_routes.values())]), resources, write_error
    )
    if deployment.allowed_origins:
        inner = CorsMiddleware(inner, deployment.allowed_origins, app)
    return RequestContextMiddleware(HeadMiddleware(inner), resources, tracing)


def table_of(
    dialects: Sequence[Dialect],
    model_routes: Sequence[HTTPRouteHandler] = (*chain.from_iterable(_MODEL_ROUTES.values()),),
) -> RouteTable:
    """Make the route table: the paths of dialects as their clients send them, then the gateway's own paths."""
    table = RouteTable()
    for each in dialects:
        table.add(each.handlers, f"/{each.name}", is_prefix_sent=False, applies=each.applies)
    for prefix in ("", VERSION):
        table.add(model_routes, prefix)
    for each in dialects:
        table.add([handler for handler in each.handlers if isinstance(handler, ModelRoute)], f"/{each.name}")
    return table


def _guarded(handlers: Sequence[HTTPRouteHandler], guards: list[Guard]) -> Iterator[HTTPRouteHandler]:
    """Copy handlers, and give guards to those that run a model; a router would give them to OPTIONS and to others, too."""
    for handler in map(copy, handlers):
        if isinstance(handler, ModelRoute):
            handler.guards = guards
        yield handler


def _secured(handlers: Sequence[HTTPRouteHandler], keys: ApiKeys | None, scope: str = "search") -> Iterator[HTTPRouteHandler]:
    """Copy handlers and describe the scope that they need; a router would describe it for others with the same path, too."""
    for handler in map(copy, handlers):
        wanted = handler.scope if isinstance(handler, ModelRoute) else handler.opt.get("scope", scope)
        handler.security = _security(keys, wanted)
        yield handler


def _security(keys: ApiKeys | None, scope: str) -> list[SecurityRequirement]:
    return [] if keys is None else [{name: [scope]} for name in KEY_SCHEMES]
