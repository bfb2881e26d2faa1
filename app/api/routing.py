"""GET /routes, and PUT and DELETE /routes/{name} for callers whose key has the scope `admin`: names that stand for models."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, cast

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from app.api.dependencies import WorkerPipeline
from app.api.documentation.openapi import ADMIN
from app.errors import InvalidParameter, ModelsNotManaged, UnknownModel, UnknownVersion
from app.model.reference import split_reference
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.routing.route import Route
from app.routing.router import Router
from app.routing.routes import Routes, RoutesError

_Name = FromPath[Annotated[str, Meta(description="Name of a route.")]]


@get("/routes", summary="List the names that stand for models")
async def routes(pipeline: WorkerPipeline) -> dict[str, Route]:
    """List the routes by name. Requests can name a route instead of a model."""
    router = cast("Router | None", pipeline.router)
    return {} if router is None else {name: _with_folder(route, "") for name, route in router.routes.known.items()}


@put("/routes/{name:str}", summary="Add or replace a route", **ADMIN)
async def put_route(name: _Name, data: JSONBody[Route], pipeline: WorkerPipeline) -> Route:
    """Write a route into the routes file; the workers of all hosts that read this file use it within a second."""
    with _changing(pipeline) as routes:
        if data.shadow and data.shadow.keep:
            raise InvalidParameter("shadow.keep: a folder can only be named in the routes file")
        await _check_models(name, data, pipeline)
        known = routes.known.get(name)
        folder = known.shadow.keep if known and known.shadow else ""
        await asyncio.to_thread(routes.put, name, _with_folder(data, folder))
    return data


@delete("/routes/{name:str}", summary="Remove a route", **ADMIN)
async def delete_route(name: _Name, pipeline: WorkerPipeline) -> None:
    """Remove a route from the routes file."""
    with _changing(pipeline) as routes:
        if not await asyncio.to_thread(routes.put, name, None):
            raise UnknownModel(f"there is no route {name[:64]!r}; GET /routes lists those that exist")


def _with_folder(route: Route, folder: str) -> Route:
    """Return a route whose shadow has another folder for pictures, which is a matter of the file: no caller sees or sets it."""
    shadow = route.shadow and msgspec.structs.replace(route.shadow, keep=folder)
    return msgspec.structs.replace(route, shadow=shadow)


ADMIN_ROUTES = [put_route, delete_route]


@contextmanager
def _changing(pipeline: Pipeline) -> Iterator[Routes]:
    router = cast("Router | None", pipeline.router)
    if router is None:
        raise ModelsNotManaged("there are no routes here; set NEREID_ROUTES_FILE")
    try:
        yield router.routes
    except ValueError as error:
        raise InvalidParameter(str(error)) from None
    except (RoutesError, OSError) as error:
        reason = getattr(error, "strerror", "it is not valid; the log says why")
        raise ModelsNotManaged(f"the routes file cannot be written: {reason}") from error


async def _check_models(name: str, route: Route, pipeline: Pipeline) -> None:
    if name in {*pipeline.pullable, *await pipeline.tritons.list_models()}:
        raise InvalidParameter(f"{name} is a model; give the route another name")
    tasks = {}
    for field, reference in route.references:
        try:
            model = pipeline.refer_to(*split_reference(reference))
            tasks[field] = (await pipeline.prepare(model, Deadline.after(pipeline.limits.timeout_seconds))).head.task
        except (UnknownModel, UnknownVersion) as error:
            raise InvalidParameter(f"{field}: {error.detail}") from None
    if len({*tasks.values()}) > 1:
        raise InvalidParameter(f"the models of a route have one task, but here {tasks}")
