"""The dialect of Nuclio's dashboard, as far as CVAT uses it: each detector is a function that annotates images.

Source: CVAT's cvat/apps/lambda_manager/views.py, classes `LambdaGateway` and `LambdaFunction`.
"""

from collections.abc import Iterator
from math import cos, pi, sin
from typing import Any
from xml.sax.saxutils import quoteattr

import msgspec
import numpy as np
from litestar import get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api.answering.format import ResponseInput
from app.api.answering.native import objects, rounded
from app.api.context import header_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.dialects.dialect import (
    AnyRequest,
    ConfidenceParameters,
    Dialect,
    OptionsByModel,
    detect,
    detectors,
    side_lengths,
)
from app.api.parameters.parse import Fraction
from app.api.receiving.body import parse_body
from app.api.routes import ModelRoute
from app.errors import UnknownModel
from app.model.heads import HEADS, PoseHead, Task
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.results import Detections

_LABEL_TYPES: dict[Task, str] = {"segmentation": "polygon", "pose": "skeleton"}
_ROTATION_DIGITS = 4
_FUNCTION = b"x-nuclio-function-name"


class _Parameters(ConfidenceParameters, frozen=True, kw_only=True):
    kind = OptionsByModel
    confidence: Fraction = msgspec.field(default=0.5, name="threshold")
    """The default of CVAT's own functions; CVAT sends a threshold only if its user sets one."""
    url: str | None = None
    """The URL of the image. Not part of CVAT."""


@get("/api/functions")
async def functions(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """List the detectors, by name."""
    return {spec.name: to_function(spec, spec.name) for spec in await detectors(request, worker, pipeline, HEADS)}


@get("/api/functions/{name:str}")
async def function(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, name: FromPath[str]) -> dict[str, Any]:
    """Describe a detector, or the one for which a route stands."""
    reference = pipeline.refer_to(name, None)
    if split_reference(reference)[0] in {spec.name for spec in await detectors(request, worker, pipeline, HEADS)}:
        return to_function(await pipeline.spec(reference), name)
    raise UnknownModel("there is no such detector; GET /api/functions lists them")


@ModelRoute("/api/function_invocations", key_in="query", model_header=_FUNCTION)
async def invoke(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Detect objects with the model that a header names."""
    name = header_of(request.scope, _FUNCTION)
    return await detect(request, worker, pipeline, _Parameters, parse_body, _describe, [("model", name)] if name else [])


def to_function(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Describe a model under this name. Of several classes of one name, only the first is a label: CVAT needs unique names."""
    ids = {spec.class_name(id_): id_ for id_ in reversed(range(len(spec.labels)))}
    kind = {"type": _LABEL_TYPES.get(spec.head.task, "rectangle"), **_skeleton(spec)}
    labels = [{"id": id_, "name": name, **kind} for name, id_ in reversed(ids.items())]
    annotations = {
        "name": name,
        "type": "detector",
        "version": "1",  # of the function, not of the model; CVAT converts it to an integer
        "spec": msgspec.json.encode(labels).decode(),
    }
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"description": f"{name}, by Nereid"},
        "status": {"state": "ready", "httpPort": 0},  # no port of its own: CVAT calls it through the dashboard
    }


def _skeleton(spec: ModelSpec) -> dict[str, Any]:
    """Return the keypoints of a pose model, and a drawing of them, on a circle: the model does not say which are connected."""
    if not isinstance(spec.head, PoseHead):
        return {}
    names = list(dict.fromkeys(spec.head.keypoint_names))
    angles = [2 * pi * index / len(names) for index in range(len(names))]
    nodes = (
        f'<circle r="0.75" cx="{50 + 40 * sin(angle):.2f}" cy="{50 - 40 * cos(angle):.2f}" data-type="element node" '
        f'data-element-id="{id_}" data-node-id="{id_}" data-label-name={quoteattr(name)}></circle>'
        for id_, (name, angle) in enumerate(zip(names, angles, strict=True), 1)
    )
    sublabels = [{"id": id_, "name": name, "type": "points"} for id_, name in enumerate(names)]
    return {"sublabels": sublabels, "svg": "\n".join(nodes)}


def _describe(given: ResponseInput[Detections]) -> list[dict[str, Any]]:
    """Describe each object by shapes, in pixels of the upright image; `points` are x1 y1 x2 y2 and so on."""
    found = given.found
    return [
        {"confidence": str(score), "label": name, "attributes": (), **shape}
        for (_, score, _, name), shapes in zip(objects(found, "pixel"), _shapes(found, given.wanted.confidence), strict=True)
        for shape in shapes
    ]


def _shapes(found: Detections, threshold: float) -> Iterator[list[dict[str, Any]]]:
    """Return the shapes of each object, of its label's type; none if its mask is empty or all its keypoints are `outside`.

    The polygons of an object have one `group_id`. Keypoints below the threshold are `outside`, as in CVAT's own functions.
    """
    if found.masks is not None:
        for group, mask in enumerate(found.masks, 1):
            grouped = {"group_id": group} if len(mask.parts) > 1 else {}
            yield [{"type": "polygon", "points": rounded(part.ravel()), **grouped} for part in mask.parts]
    elif found.keypoints is not None and isinstance(found.spec.head, PoseHead):
        for own in found.keypoints:
            elements = [
                {"label": name, "type": "points", "points": point, "outside": bool((visibility < threshold).any())}
                for name, point, visibility in zip(found.spec.head.keypoint_names, rounded(own[:, :2]), own[:, 2:], strict=True)
            ]
            yield [] if all(element["outside"] for element in elements) else [{"type": "skeleton", "elements": elements}]
    elif found.corners is not None:
        centres, sizes = found.corners.mean(axis=1), side_lengths(found.corners)
        boxes = rounded(np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1))
        for box, rotation in zip(boxes, rounded(np.degrees(found.rotations), _ROTATION_DIGITS), strict=True):
            yield [{"type": "rectangle", "points": box, "rotation": rotation}]
    else:
        yield from ([{"type": "rectangle", "points": box}] for box in rounded(found.boxes))


DIALECT = Dialect("cvat", [functions, function, invoke])
