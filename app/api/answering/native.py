"""Results as JSON: detections, with boxes in the requested format, also as COCO results, classifications, and vectors."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from litestar.response.base import ASGIResponse
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from app.api.answering.format import Format, ResponseInput
from app.api.answering.responses import JsonResponse, LargeResponse
from app.api.answering.schema import (
    BoxFormat,
    Classification,
    ClassifyResponse,
    CocoResult,
    Detection,
    DetectResponse,
    EmbedResponse,
    ImageSize,
    Keypoint,
    ModelUsed,
)
from app.model.heads import PoseHead
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Classifications, Detections, Embedding, TaskResult

# Resolution: 1/10000 of the score, 1/100 of a pixel, 1/60 of a pixel in the widest image.
_SCORE_DIGITS = 4
_PIXEL_DIGITS = 2
_FRACTION_DIGITS = 6
# A vector of 1,280 numbers keeps its direction to within 1e-5.
_VECTOR_DIGITS = 7
_BBOXES = ("coco", "cxcywh")
# Coordinates and confidences of keypoints whose conversion takes the event loop 5 ms.
_MANY = 20_000
_LARGE_BYTES = 1 << 18


def to_response(
    found: Detections, unit: BoxFormat, ending: Mapping[str, Any], visualization: bytes | UnsetType = UNSET
) -> DetectResponse:
    """Describe the result of one request, whose `RequestContext.ending` it has; add its picture, if any."""
    detections = to_detections(found, unit)
    return DetectResponse(detections, len(detections), visualization, **ending_of(found, ending))


def ending_of(found: TaskResult, ending: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ResultOfModel`."""
    return {"status": "success", "image": ImageSize(found.width, found.height), "model": ModelUsed.of(found), **ending}


def to_detections(found: Detections, unit: BoxFormat) -> list[Detection]:
    """Convert detections to their JSON objects.

    Units: `normalized` corners, 0 to 1; in pixels: `pixel` corners, `coco` x y width height, `cxcywh` centre x y width height.
    """
    return [
        Detection(
            **({"bbox": tuple(box)} if unit in _BBOXES else dict(zip(("x1", "y1", "x2", "y2"), box, strict=True))),
            confidence=score,
            class_=id_,
            class_id=id_,
            class_name=name,
            **shape,
        )
        for (box, score, id_, name), shape in zip(objects(found, unit), _shapes(found, unit), strict=False)
    ]


def _shapes(found: Detections, unit: BoxFormat) -> Iterator[dict[str, Any]]:
    digits = _FRACTION_DIGITS if unit == "normalized" else _PIXEL_DIGITS
    size = np.array([found.width, found.height] if unit == "normalized" else [1, 1], np.float64)
    if found.masks is not None:
        for mask in found.masks:
            match mask.encoded:
                case None:
                    yield {"mask": [rounded((part / size).ravel(), digits) for part in mask.parts]}
                case bytes():
                    yield {"mask": mask.encoded, "mask_offset": mask.offset}
                case _:
                    yield {"mask": mask.encoded}
    elif found.keypoints is not None and isinstance(found.spec.head, PoseHead):
        for own in found.keypoints:
            confidences = rounded(own[:, 2], _SCORE_DIGITS) if own.shape[1] > 2 else repeat(UNSET)  # noqa: PLR2004 - x and y
            points = zip(rounded(own[:, :2] / size, digits), confidences, found.spec.head.keypoint_names, strict=False)
            yield {"keypoints": [Keypoint(x, y, confidence, name) for (x, y), confidence, name in points]}
    elif found.corners is not None:
        rotations = rounded(found.rotations, _FRACTION_DIGITS)
        for rotation, corners in zip(rotations, rounded(found.corners / size, digits), strict=True):
            yield {"rotation": rotation, "corners": corners}
    else:
        yield from repeat({})


def objects(found: Detections, unit: BoxFormat, digits: int | None = None) -> Iterator[tuple[list[float], float, int, str]]:
    """Return box, score, class id and class name of each object, by descending score; boxes as of `to_detections`."""
    ids: list[int] = found.class_ids.tolist()
    return zip(_to_boxes(found, unit, digits), to_scores(found.scores), ids, map(found.spec.class_name, ids), strict=True)


def _to_boxes(found: Detections, unit: BoxFormat, digits: int | None) -> list[list[float]]:
    if not len(found.scores):
        return []
    boxes = found.boxes.astype(np.float64)
    if unit == "normalized":
        boxes /= np.array([found.width, found.height] * 2)
    elif unit in _BBOXES:
        boxes[:, 2:] -= boxes[:, :2]
    if unit == "cxcywh":
        boxes[:, :2] += boxes[:, 2:] / 2
    if digits is None:
        digits = _FRACTION_DIGITS if unit == "normalized" else _PIXEL_DIGITS
    return rounded(boxes, digits)


def rounded(values: NDArray[np.floating[Any]], digits: int = _PIXEL_DIGITS) -> list[Any]:
    """Return the values of an array of any shape as a list of the same shape, by default as pixels."""
    numbers: list[Any] = values.astype(np.float64).round(digits).tolist()
    return numbers


def to_scores(scores: NDArray[np.float32]) -> list[float]:
    """Return each score, rounded and at most 1."""
    return [min(round(score, _SCORE_DIGITS), 1.0) for score in scores.astype(np.float64).tolist()]


def is_large(found: TaskResult) -> bool:
    """Return whether a result has masks or many keypoints, of which there may be megabytes."""
    if not isinstance(found, Detections):
        return False
    return found.masks is not None or (found.keypoints is not None and found.keypoints.size > _MANY)


async def respond_json(describe: Callable[[], object], found: TaskResult, pipeline: Pipeline, call: CallContext) -> ASGIResponse:
    """Respond with the object that `describe` makes of a result as JSON."""
    return await respond_in_thread(describe, pipeline, call) if is_large(found) else JsonResponse(msgspec.json.encode(describe()))


async def respond_in_thread(describe: Callable[[], object], pipeline: Pipeline, call: CallContext) -> ASGIResponse:
    """Respond with the object that `describe` makes as JSON; both are done in a thread."""
    body = await pipeline.threads.run(lambda: msgspec.json.encode(describe()), call.deadline, turn=call.turn())
    return LargeResponse(body, "application/json", pipeline.admission.memory) if len(body) > _LARGE_BYTES else JsonResponse(body)


def describe(given: ResponseInput[Detections], visualization: bytes | UnsetType = UNSET) -> DetectResponse | dict[str, Any]:
    """Describe the result of a request, and of a cascade what its later steps say; add the picture, if any."""
    response = to_response(given.found, given.wanted.boxes, given.context.ending, visualization)
    return response if given.add_steps is None else given.add_steps(msgspec.to_builtins(response))


async def _respond(given: ResponseInput[Detections]) -> ASGIResponse:
    if given.add_steps is not None:
        return await respond_in_thread(partial(describe, given), given.pipeline, given.call)
    return await respond_json(partial(describe, given), given.found, given.pipeline, given.call)


JSON = Format("json", ("application/json",), _respond)


def to_classifications(found: Classifications) -> list[Classification]:
    """Convert classes to their JSON objects."""
    return [
        Classification(class_=id_, class_id=id_, class_name=found.spec.class_name(id_), confidence=score)
        for id_, score in zip(found.class_ids.tolist(), to_scores(found.scores), strict=True)
    ]


async def _respond_with_classes(given: ResponseInput[Classifications]) -> JsonResponse:
    classes, ending = to_classifications(given.found), ending_of(given.found, given.context.ending)
    return JsonResponse(msgspec.json.encode(ClassifyResponse(classes, len(classes), **ending)))


CLASSES_JSON = Format("json", ("application/json",), _respond_with_classes)


def to_vector(vector: NDArray[np.float32]) -> list[float]:
    """Return a vector of length 1 as a list."""
    return rounded(vector, _VECTOR_DIGITS)


def to_norm(norm: float) -> float:
    """Return the length of a model's own vector, rounded."""
    return float(f"{norm:.6g}")


async def _respond_with_vector(given: ResponseInput[Embedding]) -> JsonResponse:
    found, wanted, ending = given.found, given.wanted, ending_of(given.found, given.context.ending)
    response = EmbedResponse(to_vector(found.vector), to_norm(found.norm), wanted.image_id, wanted.index, **ending)
    return JsonResponse(msgspec.json.encode(response))


VECTOR_JSON = Format("json", ("application/json",), _respond_with_vector)


def to_coco_results(found: Detections, image_id: int) -> list[CocoResult]:
    """Convert the detections in an image to COCO results with this image id, which pycocotools' `loadRes` reads."""
    return [
        CocoResult(image_id, class_id, (x, y, width, height), score, **shape)
        for ((x, y, width, height), score, class_id, _), shape in zip(objects(found, "coco"), _coco_shapes(found), strict=False)
    ]


def _coco_shapes(found: Detections) -> Iterator[dict[str, Any]]:
    if found.masks is not None:
        yield from ({"segmentation": mask.encoded} for mask in found.masks)
    elif found.keypoints is not None:
        points = found.keypoints.astype(np.float64)
        if points.shape[2] == 2:  # noqa: PLR2004 - COCO's have three values
            points = np.concatenate([points, np.ones_like(points[..., :1])], axis=2)
        yield from ({"keypoints": own} for own in rounded(points.reshape(len(points), -1), _SCORE_DIGITS))
    elif found.corners is not None:
        yield from ({"segmentation": [own]} for own in rounded(found.corners.reshape(-1, 8)))
    else:
        yield from repeat({})


async def _respond_with_results(given: ResponseInput[Detections]) -> ASGIResponse:
    describe = partial(to_coco_results, given.found, given.wanted.image_id)
    return await respond_json(describe, given.found, given.pipeline, given.call)


COCO_RESULTS = Format("coco-results", (), _respond_with_results)
