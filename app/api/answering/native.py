"""Results as JSON: detections, with boxes in the requested format, also as COCO results, and classifications."""

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.api.answering.format import Format, ResponseInput
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import (
    BoxFormat,
    Classification,
    ClassifyResponse,
    CocoResult,
    Detection,
    DetectResponse,
    ImageSize,
    ModelUsed,
)
from app.pipeline.call import Classifications, Detections

# Resolution: 1/10000 of the score, 1/100 of a pixel, 1/60 of a pixel in the widest image.
_SCORE_DIGITS = 4
_PIXEL_DIGITS = 2
_FRACTION_DIGITS = 6
_BBOXES = ("coco", "cxcywh")


def to_response(found: Detections, unit: BoxFormat, total_time_ms: float, request_id: str) -> DetectResponse:
    """Describe the result of one request."""
    detections = to_detections(found, unit)
    return DetectResponse(
        detections=detections,
        num_detections=len(detections),
        status="success",
        image=ImageSize(found.width, found.height),
        model=ModelUsed.of(found),
        total_time_ms=round(total_time_ms, 2),
        request_id=request_id,
    )


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
        )
        for box, score, id_, name in objects(found, unit)
    ]


def objects(found: Detections, unit: BoxFormat, digits: int | None = None) -> Iterator[tuple[list[float], float, int, str]]:
    """Return box, score, class id and class name of each object, by descending score.

    Boxes are in this unit, as for `to_detections`, rounded to as many digits, by default as in the gateway's own responses.
    """
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
    numbers: list[list[float]] = boxes.round(digits).tolist()
    return numbers


def to_scores(scores: NDArray[np.float32]) -> list[float]:
    """Return each score, rounded and at most 1."""
    return [min(round(score, _SCORE_DIGITS), 1.0) for score in scores.astype(np.float64).tolist()]


async def _respond(given: ResponseInput[Detections]) -> JsonResponse:
    context = given.context
    response = to_response(given.found, given.wanted.boxes, context.timing.total, context.request_id)
    return JsonResponse(msgspec.json.encode(response))


JSON = Format("json", ("application/json",), _respond)


async def _respond_with_classes(given: ResponseInput[Classifications]) -> JsonResponse:
    found = given.found
    classifications = [
        Classification(class_=id_, class_id=id_, class_name=found.spec.class_name(id_), confidence=score)
        for id_, score in zip(found.class_ids.tolist(), to_scores(found.scores), strict=True)
    ]
    response = ClassifyResponse(
        classifications=classifications,
        num_classifications=len(classifications),
        status="success",
        image=ImageSize(found.width, found.height),
        model=ModelUsed.of(found),
        total_time_ms=round(given.context.timing.total, 2),
        request_id=given.context.request_id,
    )
    return JsonResponse(msgspec.json.encode(response))


CLASSES_JSON = Format("json", ("application/json",), _respond_with_classes)


def to_coco_results(found: Detections, image_id: int) -> list[CocoResult]:
    """Convert the detections in an image to COCO results with this image id, which pycocotools' `loadRes` reads."""
    return [
        CocoResult(image_id, class_id, (x, y, width, height), score)
        for (x, y, width, height), score, class_id, _ in objects(found, "coco")
    ]


async def _respond_with_results(given: ResponseInput[Detections]) -> JsonResponse:
    return JsonResponse(msgspec.json.encode(to_coco_results(given.found, given.wanted.image_id)))


COCO_RESULTS = Format("coco-results", (), _respond_with_results)
