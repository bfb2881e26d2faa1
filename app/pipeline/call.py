"""Types of a call of the pipeline: question, context and result."""

from collections.abc import Callable, Sequence
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
from app.imaging.transform import ImageTransform
from app.model.heads import HEADS, ClassificationHead, DetectionHead, ObbHead, PoseHead, SegmentationHead, Task
from app.model.outputs import take_outputs
from app.model.spec import ModelSpec
from app.obb import boxes as oriented
from app.pose.keypoints import read_keypoints
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller, Turn
from app.segmentation.mask import Mask, MaskFormat
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
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
    """Version of the model that answered."""
    found: Candidates | NDArray[np.float32]
    """All candidates above the model's floor, in pixels of its input; of a classifier the probabilities (classes,)."""
    transform: ImageTransform
    """The position of the image in the model's input."""
    prototypes: NDArray[Any] | None = None
    """The last output of a segmentation, from which masks are made."""


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
        """Check the question against the model, and return the reader of its answer.

        Raises:
            WrongTask: The model has another task.
            InvalidParameter: The model does not support a parameter.
        """


class DetectOptions(NamedTuple):
    """Parameters of a detection."""

    model: str | None
    """Name of the model; None for the default model."""
    confidence: float
    """Minimum score."""
    classes: list[str] | None
    """Names or ids; None for all classes."""
    max_detections: int
    iou: float | None = None
    """Intersection over union above which two boxes count as one object; None for `default_iou`."""
    agnostic: bool = False
    """Whether boxes of different classes can count as one object."""
    version: int | None = None
    """Version of the model; None for the newest that Triton has loaded."""
    lowers_iou: bool = False
    """Whether an `iou` above the maximum of the model is lowered to it; otherwise it is rejected."""
    default_iou: float | None = None
    """Used if `iou` is None, except for models without duplicate boxes; None for the threshold in the model's config."""
    drops_unknown: bool = False
    """Whether classes that the model does not have are left out of `classes`; otherwise they are rejected."""

    task: Task = DetectionHead.task
    """Task of the model, one of `HEADS`."""
    masks: MaskFormat = "polygon"
    """How the masks of a segmentation are encoded."""

    def reader(self, spec: ModelSpec) -> Reader["Detections"]:
        """Return the reader of detections.

        Raises:
            WrongTask: The model has another task.
            InvalidParameter: The model does not have one of the classes, or its own suppression has a lower threshold than `iou`.
        """
        head = spec.expect_head(HEADS[self.task])
        class_ids = to_class_ids(self.classes, spec.labels, drops_unknown=self.drops_unknown)
        iou = self.default_iou if self.iou is None and not head.finds_once else self.iou
        iou = min(iou, head.max_iou) if self.lowers_iou and iou is not None else iou
        suppress = oriented.suppress if isinstance(head, ObbHead) else nms.suppress
        suppression = to_suppression(iou, head, is_agnostic=self.agnostic, suppress=suppress)
        wanted = partial(select, confidence=self.confidence, class_ids=class_ids, suppression=suppression)
        has_masks = isinstance(head, SegmentationHead) and self.masks != "none"
        return Reader(
            partial(_read_detections, wanted, self),
            is_heavy=suppression is not None or has_masks,
            pixel_bytes=_MASK_BYTES if has_masks and self.masks != "polygon" else 0,
        )


class ClassifyOptions(NamedTuple):
    """Parameters of a classification."""

    model: str | None
    """Name of the model; None for the default model."""
    confidence: float
    """Minimum probability."""
    top_k: int
    """Maximum number of classes."""
    version: int | None = None
    """Version of the model; None for the newest that Triton has loaded."""

    @property
    def task(self) -> Task:
        """Task of the model."""
        return ClassificationHead.task

    def reader(self, spec: ModelSpec) -> Reader["Classifications"]:
        """Return the reader of classifications.

        Raises:
            WrongTask: The model is not a classifier.
        """
        spec.expect_head(ClassificationHead)
        return Reader(partial(_read_classifications, self), is_heavy=False)


class CallContext(NamedTuple):
    """Context of a request in all steps of the pipeline."""

    deadline: Deadline
    timing: Timing
    """Records the stages `model` (spec and admission), `queue` (wait for a thread), `decode`, `batch`, `infer` and `post`."""
    request_id: str
    """Id in Triton's log."""
    caller: Caller = ANYBODY
    """Whose request it is."""
    trace: TraceContext | None = None
    """Parent span of Triton's spans; None without tracing."""
    is_batch: bool = False
    """Whether the image belongs to a batch, and comes behind single ones."""
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

    def turn(self, cost: float = 0.0) -> Turn:
        """Return the turn of work for the request; for jobs, `cost` is in pixels to decode."""
        return Turn(self.caller, cost, self.is_batch)

    def pinned_to(self, version: int | None) -> "CallContext":
        """Require the version of the spec if the request asks for a version."""
        return self if version is None else self._replace(is_pinned=True)


class Detections(NamedTuple):
    """Detected objects of one image, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the upright image, clipped to it."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    width: int
    height: int
    """Size of the upright image, pixels."""
    spec: ModelSpec
    version: str
    """Version of the model that answered."""
    masks: Sequence[Mask] | None = None
    """(n,) for a segmentation with masks."""
    keypoints: NDArray[np.float32] | None = None
    """(n, keypoints, 2 or 3) for a pose: x and y in pixels of the upright image, clipped to it, and the confidence, 0 to 1."""
    corners: NDArray[np.float32] | None = None
    """(n, 4, 2) for oriented boxes: x and y in pixels of the upright image, not clipped, clockwise from a long edge."""

    @property
    def rotations(self) -> NDArray[np.float32]:
        """(n,) angles of oriented boxes in radians, from 0 to pi, clockwise from the x axis to the first edge."""
        assert self.corners is not None  # noqa: S101 - of oriented boxes only
        return oriented.to_rotations(self.corners)


class Classifications(NamedTuple):
    """Classes of one image, by descending probability."""

    class_ids: NDArray[np.int32]
    """(n,)."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    width: int
    height: int
    """Size of the upright image, pixels."""
    spec: ModelSpec
    version: str
    """Version of the model that answered."""


TaskResult = Detections | Classifications
"""The result of any task."""


def trivial_question(spec: ModelSpec) -> Question[object]:
    """Make a question that the model can answer, for warm-ups and probes."""
    if isinstance(spec.head, ClassificationHead):
        return ClassifyOptions(spec.name, 1.0, 1)
    return DetectOptions(spec.name, 1.0, None, 1, task=spec.head.task, masks="none")


def decode(spec: ModelSpec, result: InferResult, transform: ImageTransform) -> Decoded:
    """Decode the outputs for one image.

    Raises:
        InvalidImage: The model reports that it could not decode the image.
        InvalidModelOutput: The outputs are invalid.
    """
    if isinstance(spec.head, ClassificationHead):
        return Decoded(spec, result.version, decode_scores(spec, result.outputs), transform)
    prototypes = take_outputs(spec, result.outputs)[-1] if isinstance(spec.head, SegmentationHead) else None
    return Decoded(spec, result.version, decode_boxes(spec, result.outputs), transform, prototypes)


def _read_detections(
    wanted: Callable[[Candidates], Candidates], options: DetectOptions, decoded: Decoded, deadline: Deadline
) -> Detections:
    """Select the requested detections and map them to the image."""
    spec, transform = decoded.spec, decoded.transform
    assert isinstance(decoded.found, Candidates)  # noqa: S101 - of a model with boxes
    head, found = spec.head, wanted(decoded.found)
    corners = oriented.to_corners(found) if isinstance(head, ObbHead) else None
    boxes = transform.to_image(found.boxes if corners is None else oriented.enclose(corners))
    best = choose_best(boxes, options.max_detections)
    found = found.take(best)
    detections = Detections(
        boxes[best], found.scores, found.class_ids, transform.image_width, transform.image_height, spec, decoded.version
    )
    if corners is not None:
        return detections._replace(corners=transform.points_to_image(corners[best]))
    if isinstance(head, PoseHead) and found.features is not None:
        return detections._replace(keypoints=read_keypoints(found.features, len(head.keypoint_names), transform))
    if decoded.prototypes is not None and options.masks != "none":
        from app.segmentation.masks import make_masks  # noqa: PLC0415 - OpenCV, without which `doctor` must start

        masks = make_masks(spec.name, found, decoded.prototypes, spec.input_size, transform, options.masks, deadline)
        return detections._replace(masks=masks)
    return detections


def _read_classifications(options: ClassifyOptions, decoded: Decoded, _: Deadline) -> Classifications:
    assert isinstance(decoded.found, np.ndarray)  # noqa: S101 - of a classifier
    best = rank(decoded.found, top_k=options.top_k, confidence=options.confidence)
    return Classifications(*best, decoded.transform.image_width, decoded.transform.image_height, decoded.spec, decoded.version)
