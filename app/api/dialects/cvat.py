"""The dialect of Nuclio's dashboard, as far as CVAT uses it: each detector is a function that annotates images.

Source: CVAT's cvat/apps/lambda_manager/views.py, classes `LambdaGateway` and `LambdaFunction`.
"""

from typing import Any

import msgspec
from litestar import get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api.answering.format import ResponseInput
from app.api.answering.native import objects
from app.api.context import header_of
from app.api.dependencies import Worker
from app.api.dialects.dialect import AnyRequest, ConfidenceParameters, Dialect, Fraction, detect, detectors
from app.api.receiving.body import parse_body
from app.api.routes import ModelRoute
from app.errors import UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.call import Detections

_FUNCTION = b"x-nuclio-function-name"
"""The header that names the function."""


class _Parameters(ConfidenceParameters, frozen=True, kw_only=True):
    confidence: Fraction = msgspec.field(default=0.5, name="threshold")
    """The default of CVAT's own functions; CVAT sends a threshold only if its user sets one."""
    url: str | None = None
    """The URL of the image. Not part of CVAT."""


@get("/api/functions")
async def functions(request: AnyRequest, worker: Worker) -> dict[str, Any]:
    """List the detectors, by name."""
    return {spec.name: to_function(spec) for spec in await detectors(request, worker)}


@get("/api/functions/{name:str}")
async def function(request: AnyRequest, worker: Worker, name: FromPath[str]) -> dict[str, Any]:
    """Describe a detector."""
    for spec in await detectors(request, worker):
        if spec.name == name:
            return to_function(spec)
    raise UnknownModel("there is no such detector; GET /api/functions lists them")


@ModelRoute("/api/function_invocations", key_in="query", model_header=_FUNCTION)
async def invoke(request: AnyRequest, worker: Worker) -> ASGIResponse:
    """Detect objects with the model that a header names."""
    name = header_of(request.scope, _FUNCTION)
    return await detect(request, worker, _Parameters, parse_body, _describe, [("model", name)] if name else [])


def to_function(spec: ModelSpec) -> dict[str, Any]:
    """Describe a detector. Only the first of several classes with the same name becomes a label: CVAT needs unique names."""
    ids = {spec.class_name(id_): id_ for id_ in reversed(range(len(spec.labels)))}
    labels = [{"id": id_, "name": name, "type": "rectangle"} for name, id_ in reversed(ids.items())]
    annotations = {
        "name": spec.name,
        "type": "detector",
        "version": "1",  # of the function, not of the model; CVAT converts it to an integer
        "spec": msgspec.json.encode(labels).decode(),
    }
    return {
        "metadata": {"name": spec.name, "annotations": annotations},
        "spec": {"description": f"{spec.name}, by Nereid"},
        "status": {"state": "ready", "httpPort": 0},  # no port of its own: CVAT calls it through the dashboard
    }


def _describe(given: ResponseInput[Detections]) -> list[dict[str, Any]]:
    """Describe each object by a shape; its `points` are x1 y1 x2 y2, pixels of the upright image."""
    return [
        {"confidence": str(score), "label": name, "points": points, "type": "rectangle", "attributes": ()}
        for points, score, _, name in objects(given.found, "pixel")
    ]


DIALECT = Dialect("cvat", [functions, function, invoke])
