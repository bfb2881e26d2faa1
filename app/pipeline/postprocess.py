"""Make detections of a model's output tensors."""

from typing import Any

from numpy.typing import NDArray

from app.detection.outputs import Candidates, decode_outputs
from app.detection.select import select
from app.imaging.letterbox import LetterboxTransform
from app.model.spec import ModelSpec
from app.pipeline.call import DetectOptions


def find(
    spec: ModelSpec,
    outputs: dict[str, NDArray[Any]],
    transform: LetterboxTransform,
    options: DetectOptions,
    class_ids: frozenset[int] | None,
) -> Candidates:
    """Decode the outputs to what the caller wants, in pixels of the image."""
    found = decode_outputs(spec, outputs)
    found = found._replace(boxes=transform.to_image(found.boxes))
    return select(found, confidence=options.confidence, class_ids=class_ids, max_detections=options.max_detections)
