"""The dialect of Nuclio's dashboard, as far as CVAT uses it: each detector is a function that annotates images.

Source: CVAT's cvat/apps/lambda_manager/views.py, classes `LambdaGateway` and `LambdaFunction`.
"""

from typing import Annotated, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.format import ResponseInput
from app.api.answering.native import to_boxes, to_scores
from app.api.answering.responses import JsonResponse
from app.api.context import header_of
from app.api.dependencies import WorkerResources
from app.api.dialects.detection import detect
from app.api.dialects.detectors import detectors
from app.api.dialects.dialect import AnyRequest, Dialect, DialectParameters
from app.api.receiving import json_body
from app.api.receiving.body import ParsedBody
from app.api.receiving.json_body import decode_base64
from app.api.routes import ModelRoute
from app.errors import MalformedRequest, UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.call import MAX_DETECTIONS, Detections, DetectOptions

_FUNCTION = b"x-nuclio-function-name"
"""The header that names the function."""


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The default of CVAT's own functions; CVAT sends a threshold only if its user sets one."""

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return DetectOptions(self.model, self.threshold, None, MAX_DETECTIONS, version=self.version)


class _Invocation(msgspec.Struct, frozen=True):
    image: str
    """The image in base64."""
    threshold: float | None = None


class Label(msgspec.Struct, frozen=True):
    """A class of a detector."""

    id: int
    name: str
    type: Literal["rectangle"] = "rectangle"


class Annotations(msgspec.Struct, frozen=True, kw_only=True):
    """The annotations of a function."""

    name: str
    """The name that CVAT shows."""
    type: Literal["detector"] = "detector"
    version: Literal["1"] = "1"
    """Version of the function, not of the model. CVAT converts it to an integer."""
    spec: str
    """A list of labels in JSON. Their names must be unique, otherwise CVAT does not use the function."""


class Metadata(msgspec.Struct, frozen=True):
    """A function's name and annotations."""

    name: str
    annotations: Annotations


class FunctionSpec(msgspec.Struct, frozen=True):
    """The description that CVAT shows next to a function's name."""

    description: str


class Status(msgspec.Struct, frozen=True, rename="camel"):
    """State of a function. It has no port of its own: CVAT must call it through the dashboard."""

    state: Literal["ready"] = "ready"
    http_port: int = 0


class Function(msgspec.Struct, frozen=True):
    """A detector as a function of Nuclio."""

    metadata: Metadata
    spec: FunctionSpec
    status: Status


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One object; `points` are x1 y1 x2 y2, pixels of the upright image."""

    confidence: str
    label: str
    points: list[float]
    type: Literal["rectangle"] = "rectangle"
    attributes: tuple[()] = ()


@get("/api/functions")
async def functions(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> dict[str, Function]:
    """List the detectors, by name."""
    return {spec.name: to_function(spec) for spec in await detectors(request, worker)}


@get("/api/functions/{name:str}")
async def function(request: AnyRequest, worker: NamedDependency[WorkerResources], name: FromPath[str]) -> Function:
    """Describe a detector."""
    for spec in await detectors(request, worker):
        if spec.name == name:
            return to_function(spec)
    raise UnknownModel("there is no such detector; GET /api/functions lists them")


@ModelRoute("/api/function_invocations", key_in="query", model_header=_FUNCTION)
async def invoke(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects with the model that a header names."""
    name = header_of(request.scope, _FUNCTION)
    return await detect(request, worker, _Parameters, _parse, _respond, [("model", name)] if name else [])


def to_function(spec: ModelSpec) -> Function:
    """Describe a detector. Only the first of several classes with the same name becomes a label: CVAT needs unique names."""
    labels = {spec.class_name(id_): id_ for id_ in reversed(range(len(spec.labels)))}
    encoded = msgspec.json.encode([Label(id_, name) for name, id_ in reversed(labels.items())]).decode()
    annotations = Annotations(name=spec.name, spec=encoded)
    return Function(Metadata(spec.name, annotations), FunctionSpec(f"{spec.name}, by Nereid"), Status())


def _parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBody:
    found = json_body.decode(data, content_type, _Invocation, '{"image": "<base64>", "threshold": 0.5}')
    image = decode_base64(found.image)
    if not image:
        raise MalformedRequest("the image is empty")
    return ParsedBody(image, [] if found.threshold is None else [("threshold", str(found.threshold))])


async def _respond(given: ResponseInput[Detections], _: _Parameters) -> JsonResponse:
    found = given.found
    shapes = [
        Shape(confidence=str(score), label=found.spec.class_name(id_), points=points)
        for points, score, id_ in zip(to_boxes(found, "pixel"), to_scores(found.scores), found.class_ids.tolist(), strict=True)
    ]
    return JsonResponse(msgspec.json.encode(shapes))


DIALECT = Dialect("cvat", [functions, function, invoke])
