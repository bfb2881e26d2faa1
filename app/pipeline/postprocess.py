"""Make detections of a model's output tensors."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from app.detection.outputs import Candidates, decode_outputs
from app.detection.select import keep_best, select, to_class_ids, to_suppression
from app.imaging.letterbox import LetterboxTransform
from app.model.spec import ModelSpec
from app.pipeline.call import Detections, DetectOptions
from app.triton.messages import InferResult


class Reader(NamedTuple):
    """Reads the result of an inference as a caller wants it."""

    read: Callable[[InferResult, LetterboxTransform], Detections]
    is_heavy: bool
    """Whether that takes milliseconds of numpy, and is to be done in a thread."""


def reader(options: DetectOptions, spec: ModelSpec) -> Reader:
    """Make the reader of what a caller wants of a model.

    Raises:
        InvalidParameter: The model does not have a class, or itself suppresses more boxes than the caller wants.
    """
    class_ids = to_class_ids(options.classes, spec.labels)
    suppression = to_suppression(options.iou, spec, is_agnostic=options.agnostic)
    wanted = partial(select, confidence=options.confidence, class_ids=class_ids, suppression=suppression)
    return Reader(partial(_read, spec, wanted, options.max_detections), spec.output_format.is_heavy or suppression is not None)


def _read(
    spec: ModelSpec,
    wanted: Callable[[Candidates], Candidates],
    max_detections: int,
    result: InferResult,
    transform: LetterboxTransform,
) -> Detections:
    """Decode the outputs to what the caller wants, in pixels of the image."""
    found = wanted(decode_outputs(spec, result.outputs))
    found = keep_best(found._replace(boxes=transform.to_image(found.boxes)), max_detections)
    return Detections(*found, transform.image_width, transform.image_height, spec, result.version)
