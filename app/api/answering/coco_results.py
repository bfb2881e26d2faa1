"""Detections as a list of COCO results, which pycocotools' `loadRes` reads."""

import msgspec

from app.api.answering.format import Format, ResponseInput
from app.api.answering.native import to_boxes, to_scores
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import CocoResult
from app.pipeline.call import Detections


def to_results(found: Detections, image_id: int) -> list[CocoResult]:
    """Convert the detections in an image to COCO results with this image id."""
    return [
        CocoResult(image_id, class_id, (x, y, width, height), score)
        for class_id, (x, y, width, height), score in zip(
            found.class_ids.tolist(), to_boxes(found, "coco"), to_scores(found.scores), strict=True
        )
    ]


async def _respond(given: ResponseInput[Detections]) -> JsonResponse:
    return JsonResponse(msgspec.json.encode(to_results(given.found, given.presentation.image_id)))


COCO_RESULTS = Format("coco-results", (), _respond)
