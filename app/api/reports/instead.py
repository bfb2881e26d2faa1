"""Paths of other programs that the gateway does not have: the answer is 404, and says what to use instead."""

from litestar import route
from litestar.enums import HttpMethod

from app.api.context import AnyRequest
from app.api.routes import VERSION, route_of
from app.errors import NotOffered

_CVAT = "the gateway has no Nuclio; examples/cvat/nereid_function.py annotates a task of CVAT through cvat-cli"
_PERSONS = "faces are not grouped into persons; POST /v1/vision/face/register names one, POST /faces/identify says whose it is"
_CLUSTERS = "images are not grouped; POST /search/image finds images like one, GET /query/duplicates lists near duplicates"
_LABEL_STUDIO = "the gateway is no backend of Label Studio; clients/label-studio is a program that is one, and asks the gateway"
_INSTEAD = {
    "/connection_pool_info": "a worker has one connection to each Triton; GET /health lists the Tritons and how pixels reach them",
    "/health/models": "GET /models lists the models and their states; GET /health names those that fail",
    "/models/{model}/export": "models are not converted; POST /models/{model} adds an ONNX file, for a key with the scope admin",
    "/models/{model}/status": "GET /models/{model} describes a model and its state",
    "/models/{model}/test": "POST /predict/{model} asks a model about an image",
    "/label-studio/health": _LABEL_STUDIO,
    **{
        prefix + path: text
        for prefixes, paths, text in (
            (("", "/cvat"), ("/api/functions", "/api/functions/{model}", "/api/function_invocations"), _CVAT),
            (("", "/label-studio"), ("/setup", "/versions", "/predict", "/webhook"), _LABEL_STUDIO),
            (("/persons",), ("", "/{first}", "/{first}/{second}"), _PERSONS),
            (("/clusters",), ("", "/{first}", "/{first}/{second}"), _CLUSTERS),
        )
        for prefix in prefixes
        for path in paths
    },
}


@route(
    [path.replace("}", ":str}") for path in _INSTEAD],
    http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE],
    status_code=200,
    include_in_schema=False,
)
async def instead(request: AnyRequest) -> None:
    """Say what to use instead of a path; this needs no key."""
    raise NotOffered(_INSTEAD[route_of(request.scope).removeprefix(VERSION)])
