"""Paths of other programs that the gateway does not have: the answer is 404, and says what to use instead."""

from typing import Any

from litestar import Request, route
from litestar.enums import HttpMethod

from app.api.routes import VERSION, route_of
from app.errors import NotOffered

_CVAT = "Nuclio is not stood for; examples/cvat/nereid_function.py annotates a task of CVAT, by its command line cvat-cli"
_INSTEAD = {
    "/connection_pool_info": "a worker has one connection to each Triton; GET /health lists the Tritons and how pixels reach them",
    "/health/models": "GET /models lists the models and their states; GET /health names those that fail",
    "/models/{model}/export": "models are not converted; POST /models/{model} adds an ONNX file, for a key with the scope admin",
    "/models/{model}/status": "GET /models/{model} describes a model and its state",
    "/models/{model}/test": "POST /predict/{model} asks a model about an image",
    **{
        prefix + path: _CVAT
        for prefix in ("", "/cvat")
        for path in ("/api/functions", "/api/functions/{model}", "/api/function_invocations")
    },
}


@route(
    [path.replace("{model}", "{model:str}") for path in _INSTEAD],
    http_method=[HttpMethod.GET, HttpMethod.POST],
    status_code=200,
    include_in_schema=False,
)
async def instead(request: Request[Any, Any, Any]) -> None:
    """Say what to use instead of a path."""
    raise NotOffered(_INSTEAD[route_of(request.scope).removeprefix(VERSION)])


_GROUPS = {
    "persons": "faces are not grouped into persons; POST /v1/vision/face/register names one, POST /faces/identify says whose it is",
    "clusters": "images are not grouped; POST /search/image finds images like one, GET /query/duplicates lists near duplicates",
}


@route(
    [f"/{group}{below}" for group in _GROUPS for below in ("", "/{first:str}", "/{first:str}/{second:str}")],
    http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE],
    status_code=200,
    include_in_schema=False,
)
async def instead_of_groups(request: Request[Any, Any, Any]) -> None:
    """Say what to use instead of persons and clusters."""
    raise NotOffered(_GROUPS[route_of(request.scope).removeprefix(VERSION).split("/")[1]])
