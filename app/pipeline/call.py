"""Types of a call of the pipeline: question, context and result."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.classification.outputs import decode_outputs as decode_scores
from app.classification.outputs import rank
from app.detection import nms
from app.detection.nms import Candidates
from app.detection.outputs import decode_outputs as decode_boxes
from app.detection.select import choose_best, select, to_class_ids, to_suppression
from app.embedding.outputs import decode_vector, to_unit
from app.errors import InvalidModelOutput
from app.host import extras
from app.imaging.transform import ImageTransform
from app.model.heads import (
    HEADS,
    ClassificationHead,
    DetectionHead,
    EmbeddingHead,
    ObbHead,
    PoseHead,
    SegmentationHead,
    Task,
    TextDetectionHead,
    TextRecognitionHead,
)
from app.model.outputs import take_outputs
from app.model.spec import ModelSpec
from app.obb import boxes as oriented
from app.pipeline.results import Classifications, Detections, Embedding, TextLine, TextRegions
from app.pose.keypoints import read_keypoints
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller, Turn
from app.segmentation.mask import MaskFormat
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.text.outputs import TextSteps, decode_map, decode_steps, read_text
from app.triton.messages import InferResult

MAX_DETECTIONS = 300
"""Maximum of `DetectOptions.max_detections` that callers may request."""

# A mask in the image's size, and what its encoding takes.
_MASK_BYTES = 6

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Decoded(NamedTuple):
    """All that a model has found in one image, before anything that a request chooses: confidence, classes, overlap, units."""

    spec: ModelSpec
    version: str
    found: Candidates | NDArray[Any] | TextSteps
    """All candidates above the model's floor, in pixels of its input; of a classifier the probabilities (classes,), of an embedding
    model the vector, of a text detector the map; of a line what is most likely at each step."""
    transform: ImageTransform
    prototypes: NDArray[Any] | None = None
    """The last output of a segmentation, from which masks are made."""

    @property
    def origin(self) -> tuple[int, int, ModelSpec, str]:
        """Width and height of the upright image, the spec, and the version: what each result ends with."""
        return self.transform.image_width, self.transform.image_height, self.spec, self.version


class Reader(NamedTuple, Generic[Result_co]):
    """Reads the result of an inference."""

    read: Callable[[Decoded, Deadline], Result_co]
    """Makes the answer from what the model has found, until the deadline."""
    is_heavy: bool
    """Whether decoding and `read` take milliseconds and must run in a thread."""
    pixel_bytes: int = 0
    """Memory that `read` needs for each pixel of the image, if it is heavy."""


class Question(Protocol[Result_co]):
    """A question about an image. The pipeline knows tasks only through this protocol."""

    @property
    def model(self) -> str | None:
        """Name of the model; None for the default model of the task."""

    @property
    def version(self) -> int | None:
        """Version of the model; None for the newest that Triton has loaded."""

    @property
    def task(self) -> Task:
        """Task of the model."""

    def reader(self, spec: ModelSpec) -> Reader[Result_co]:
        """Check the question against the model, and return the reader; raises WrongTask, InvalidParameter or NotOffered."""


class DetectOptions(NamedTuple):
    """Parameters of a detection; `model` and `version` are those of `Question`."""

    model: str | None
    confidence: float
    classes: list[str] | None
    """Names or ids; None for all classes."""
    max_detections: int
    iou: float | None = None
    """Intersection over union above which two boxes count as one object; None for `default_iou`."""
    agnostic: bool = False
    """Whether boxes of different classes can count as one object."""
    version: int | None = None
    lowers_iou: bool = False
    """Whether an `iou` above the maximum of the model is lowered to it; otherwise it is rejected."""
    default_iou: float | None = None
    """Used if `iou` is None, except for models without duplicate boxes; None for the threshold in the model's config."""
    drops_unknown: bool = False
    """Whether classes that the model does not have are left out of `classes`; otherwise they are rejected."""

    task: Task = DetectionHead.task
    """Task of the model, one of `HEADS`."""
    masks: MaskFormat = "polygon"

    def reader(self, spec: ModelSpec) -> Reader["Detections"]:
        """Return the reader of detections; errors are those of `Question.reader`."""
        head = spec.expect_head(HEADS[self.task])
        class_ids = to_class_ids(self.classes, spec.labels, drops_unknown=self.drops_unknown)
        iou = self.default_iou if self.iou is None and not head.finds_once else self.iou
        iou = min(iou, head.max_iou) if self.lowers_iou and iou is not None else iou
        suppress = oriented.suppress if isinstance(head, ObbHead) else nms.suppress
        suppression = to_suppression(iou, head, is_agnostic=self.agnostic, suppress=suppress)
        wanted = partial(select, confidence=self.confidence, class_ids=class_ids, suppression=suppression)
        has_masks = isinstance(head, SegmentationHead) and self.masks != "none"
        if has_masks and self.masks == "rle":
            extras.require("masks", "encoding masks as RLE")
        return Reader(
            partial(_read_detections, wanted, self),
            is_heavy=suppression is not None or has_masks,
            pixel_bytes=_MASK_BYTES if has_masks and self.masks != "polygon" else 0,
        )


class TaskOptions(NamedTuple, Generic[Result]):
    """Parameters of a question of a task without boxes; `model` and `version` are those of `Question`."""

    task: Task
    """Task of the model, one of `_WAYS`."""
    model: str | None
    confidence: float = 0.0
    """Minimum score of a class, or of a line of text."""
    top_k: int = 1
    version: int | None = None

    def reader(self, spec: ModelSpec) -> Reader[Result]:
        """Return the reader of what the task gives; errors are those of `Question.reader`."""
        way = _WAYS[self.task]
        spec.expect_head(way.head)
        if self.task == "text_detection":
            extras.require("ocr", "finding text")
        return Reader(partial(way.read, self), way.is_heavy)


class CallContext(NamedTuple):
    """Context of a request in all steps of the pipeline."""

    deadline: Deadline
    timing: Timing
    """Records the stages `model` (spec and admission), `queue` (wait for a thread), `decode`, `batch`, `infer` and `post`."""
    request_id: str
    """Id in Triton's log."""
    caller: Caller = ANYBODY
    trace: TraceContext | None = None
    """Parent span of Triton's spans; None without tracing."""
    is_batch: bool = False
    """Whether the image belongs to a batch, and comes behind single ones."""
    image_index: int = 0
    is_later_step: bool = False
    """Whether the request has been answered in part already: then the rest comes before new requests."""
    allows_truncated: bool = False
    """Whether a JPEG whose pixels are not all there is answered."""
    is_pinned: bool = False
    """Whether the version of the spec is required; otherwise a newer version may answer."""
    uses_cache: bool = True
    """Whether a cached result may answer, and the result may be cached."""
    route_key: str = ""
    """What decides which model of a route answers, such as the id of a camera; empty if the next request may get another one."""
    after_answer: list[Callable[[], object]] | None = None
    """What begins once the answer has left; None if that may begin at once."""
    stream: str = ""
    """The stream of the caller whose newest image this is; empty for none."""

    def turn(self, cost: float = 0.0) -> Turn:
        """Return the turn of work for the request; for jobs, `cost` is in pixels to decode."""
        return Turn(self.caller, cost, self.is_batch, bool(self.stream))


def question_for(
    spec: ModelSpec, confidence: float | None = None, *, top_k: int = 1, model: str | None = None, version: int | None = None
) -> Question[Any]:
    """Ask a model for all that it finds but masks, by default under its own name and with the confidence of its task."""
    name = model or spec.name
    task = spec.head.task
    confidence = _DEFAULT_CONFIDENCES.get(task, 0.25) if confidence is None else confidence
    if task in _WAYS:
        return TaskOptions(task, name, confidence, top_k, version)
    return DetectOptions(name, confidence, None, MAX_DETECTIONS, version=version, task=task, masks="none")


def decode(spec: ModelSpec, result: InferResult, transform: ImageTransform) -> Decoded:
    """Decode the outputs for one image; raises InvalidImage if the model could not decode it, or InvalidModelOutput."""
    if (way := _WAYS.get(spec.head.task)) is not None:
        return Decoded(spec, result.version, way.decode(spec, result.outputs), transform)
    prototypes = take_outputs(spec, result.outputs)[-1] if isinstance(spec.head, SegmentationHead) else None
    return Decoded(spec, result.version, decode_boxes(spec, result.outputs), transform, prototypes)


def _read_detections(
    wanted: Callable[[Candidates], Candidates], options: DetectOptions, decoded: Decoded, deadline: Deadline
) -> Detections:
    spec, transform = decoded.spec, decoded.transform
    assert isinstance(decoded.found, Candidates)  # noqa: S101 - of a model with boxes
    head, found = spec.head, wanted(decoded.found)
    corners = oriented.to_corners(found) if isinstance(head, ObbHead) else None
    boxes = transform.to_image(found.boxes if corners is None else oriented.enclose(corners))
    best = choose_best(boxes, options.max_detections)
    found = found.take(best)
    detections = Detections(boxes[best], found.scores, found.class_ids, *decoded.origin)
    if corners is not None:
        return detections._replace(corners=transform.points_to_image(corners[best]))
    if isinstance(head, PoseHead) and found.features is not None:
        return detections._replace(keypoints=read_keypoints(found.features, len(head.keypoint_names), transform))
    if decoded.prototypes is not None and options.masks != "none":
        from app.imaging.fit import canvas_size, fit_for  # noqa: PLC0415 - OpenCV, without which `doctor` must start
        from app.segmentation.masks import make_masks  # noqa: PLC0415 - as above

        size = canvas_size(fit_for(spec), transform)
        masks = make_masks(spec.name, found, decoded.prototypes, size, transform, options.masks, deadline)
        return detections._replace(masks=masks)
    return detections


def _read_classifications(options: TaskOptions[Any], decoded: Decoded, _: Deadline) -> Classifications:
    assert isinstance(decoded.found, np.ndarray)  # noqa: S101 - of a classifier
    ids, scores = rank(decoded.found, top_k=options.top_k, confidence=options.confidence)
    return Classifications(ids, scores, *decoded.origin)


def _read_regions(options: TaskOptions[Any], decoded: Decoded, deadline: Deadline) -> TextRegions:
    from app.imaging.fit import canvas_size, fit_for  # noqa: PLC0415 - OpenCV, without which `doctor` must start
    from app.text.regions import find_regions  # noqa: PLC0415 - as above

    assert isinstance(decoded.found, np.ndarray)  # noqa: S101 - of a text detector
    spec, transform = decoded.spec, decoded.transform
    width, height = canvas_size(fit_for(spec), transform)
    if decoded.found.shape != (height, width):
        shape = "x".join(map(str, decoded.found.shape))
        raise InvalidModelOutput(f"{spec.name} returned a map of {shape} for an input of {height}x{width}")
    corners, scores = find_regions(decoded.found, transform, options.confidence, deadline)
    return TextRegions(corners, scores, *decoded.origin)


def _read_line(_: TaskOptions[Any], decoded: Decoded, __: Deadline) -> TextLine:
    assert isinstance(decoded.found, TextSteps)  # noqa: S101 - of a model that reads lines
    return TextLine(*read_text(decoded.found, decoded.spec.labels), decoded.spec, decoded.version)


def _read_embedding(_: TaskOptions[Any], decoded: Decoded, __: Deadline) -> Embedding:
    assert isinstance(decoded.found, np.ndarray)  # noqa: S101 - of an embedding model
    vector, norm = to_unit(decoded.found)
    return Embedding(vector, norm, *decoded.origin)


class _Way(NamedTuple):
    head: type[Any]
    decode: Callable[[ModelSpec, Mapping[str, NDArray[Any]]], NDArray[Any] | TextSteps]
    read: Callable[[TaskOptions[Any], Decoded, Deadline], Any]
    is_heavy: bool = False


_WAYS: dict[Task, _Way] = {
    "classification": _Way(ClassificationHead, decode_scores, _read_classifications),
    "text_detection": _Way(TextDetectionHead, decode_map, _read_regions, is_heavy=True),
    "text_recognition": _Way(TextRecognitionHead, decode_steps, _read_line),
    "embedding": _Way(EmbeddingHead, decode_vector, _read_embedding),
}
_DEFAULT_CONFIDENCES: dict[Task, float] = {"classification": 0.0, "text_detection": 0.5}
