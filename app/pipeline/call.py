"""One call of the pipeline: what the caller asks for, what goes with it, and what comes out."""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.classification.outputs import decode_outputs as decode_scores
from app.classification.rank import rank
from app.detection.outputs import Candidates
from app.detection.outputs import decode_outputs as decode_boxes
from app.detection.select import keep_best, select, to_class_ids, to_suppression
from app.imaging.transform import ImageTransform
from app.model.heads import ClassificationHead, DetectionHead, Task
from app.model.spec import ModelSpec
from app.resilience.admission import WHOLE, Share
from app.resilience.deadline import Deadline
from app.resilience.semaphore import DeadlineSemaphore
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton.messages import InferResult

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Reader(NamedTuple, Generic[Result_co]):
    """Reads the answer to a question about an image."""

    read: Callable[[InferResult, ImageTransform], Result_co]
    """From what Triton returned for the image, and where that lay in the model's input."""
    is_heavy: bool
    """Whether that takes milliseconds of numpy, and is to be done in a thread."""


class Question(Protocol[Result_co]):
    """What a caller asks about an image. The pipeline knows no more of a task than this."""

    @property
    def model(self) -> str | None:
        """Name of the model; None for the default model of the task."""

    @property
    def version(self) -> int | None:
        """Version of the model; None for the newest that Triton has loaded."""

    @property
    def task(self) -> Task:
        """What the model must have been made for."""

    def reader(self, spec: ModelSpec) -> Reader[Result_co]:
        """Return what reads the answer, before anything is done with the image.

        Raises:
            WrongTask: The model was made for another task.
            InvalidParameter: The model does not have what is asked for.
        """


class DetectOptions(NamedTuple):
    """Which objects are in the image?"""

    model: str | None
    """Name of the model; None for the default model."""
    confidence: float
    """Minimum score."""
    classes: list[str] | None
    """Names or ids; None for all classes."""
    max_detections: int
    iou: float | None = None
    """Intersection over union above which two boxes are one object; None for what the model's config says."""
    agnostic: bool = False
    """Whether boxes of different classes can be one object."""
    version: int | None = None
    """Version of the model; None for the newest that Triton has loaded."""
    lowers_iou: bool = False
    """Whether an `iou` that the model does not leave is lowered to its maximum; else it is rejected."""
    default_iou: float | None = None
    """What `iou` is where it is None, except for a model that finds each object once; None for what the model's config says."""

    @property
    def task(self) -> Task:
        """What the model must have been made for."""
        return DetectionHead.task

    def reader(self, spec: ModelSpec) -> Reader["Detections"]:
        """Return what reads the detections.

        Raises:
            WrongTask: The model is not a detector.
            InvalidParameter: It does not have one of the classes, or itself suppresses more boxes than the caller wants.
        """
        head = spec.expect_head(DetectionHead)
        class_ids = to_class_ids(self.classes, spec.labels)
        iou = self.default_iou if self.iou is None and not head.finds_once else self.iou
        iou = min(iou, head.max_iou) if self.lowers_iou and iou is not None else iou
        suppression = to_suppression(iou, head, is_agnostic=self.agnostic)
        wanted = partial(select, confidence=self.confidence, class_ids=class_ids, suppression=suppression)
        return Reader(partial(_read_detections, spec, wanted, self.max_detections), head.is_heavy or suppression is not None)


class ClassifyOptions(NamedTuple):
    """What is in the image?"""

    model: str | None
    """Name of the model; None for the default model."""
    confidence: float
    """Minimum probability."""
    top_k: int
    """How many classes at most."""
    version: int | None = None
    """Version of the model; None for the newest that Triton has loaded."""

    @property
    def task(self) -> Task:
        """What the model must have been made for."""
        return ClassificationHead.task

    def reader(self, spec: ModelSpec) -> Reader["Classifications"]:
        """Return what reads the classifications.

        Raises:
            WrongTask: The model is not a classifier.
        """
        head = spec.expect_head(ClassificationHead)
        return Reader(partial(_read_classifications, self, spec), head.is_heavy)


class CallContext(NamedTuple):
    """What goes with a request through all steps."""

    deadline: Deadline
    timing: Timing
    """Gets the laps `model` (its spec, and admission), `queue` (for a thread), `decode` (and letterbox), `infer` and `post`."""
    request_id: str
    """For Triton's log."""
    share: Share = WHOLE
    """The part of the model's limit that the request may use."""
    trace: TraceContext | None = None
    """The span that Triton's spans are to belong to, if there is one."""
    semaphore: DeadlineSemaphore | None = None
    """Limits how many images of batches wait for a thread, so that single ones need not wait behind all of them."""
    is_pinned: bool = False
    """Whether the version of the model must be that of its spec; else Triton may have a newer one by now."""

    def pinned_to(self, version: int | None) -> "CallContext":
        """Return the same for a request that asks for a version of the model, if it does."""
        return self if version is None else self._replace(is_pinned=True)


class Detections(NamedTuple):
    """What was found in one image, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the upright image, clipped to it."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    width: int
    """Width of the upright image, pixels."""
    height: int
    """Height of the upright image, pixels."""
    spec: ModelSpec
    """Spec of the model that was asked."""
    version: str
    """Version of the model that answered."""


class Classifications(NamedTuple):
    """What one image shows, by descending probability."""

    class_ids: NDArray[np.int32]
    """(n,)."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    width: int
    """Width of the upright image, pixels."""
    height: int
    """Height of the upright image, pixels."""
    spec: ModelSpec
    """Spec of the model that was asked."""
    version: str
    """Version of the model that answered."""


TaskResult = Detections | Classifications
"""The result of a model of any task."""


_TRIVIAL: dict[Task, Callable[[str], Question[object]]] = {
    DetectionHead.task: lambda model: DetectOptions(model, 1.0, None, 1),
    ClassificationHead.task: lambda model: ClassifyOptions(model, 1.0, 1),
}


def trivial_question(spec: ModelSpec) -> Question[object]:
    """Make a question that a model can answer, for a run whose answer nobody wants."""
    return _TRIVIAL[spec.head.task](spec.name)


def _read_detections(
    spec: ModelSpec,
    wanted: Callable[[Candidates], Candidates],
    max_detections: int,
    result: InferResult,
    transform: ImageTransform,
) -> Detections:
    """Decode the outputs to what the caller wants, in pixels of the image."""
    found = wanted(decode_boxes(spec, result.outputs))
    found = keep_best(found._replace(boxes=transform.to_image(found.boxes)), max_detections)
    return Detections(*found, transform.image_width, transform.image_height, spec, result.version)


def _read_classifications(
    options: ClassifyOptions, spec: ModelSpec, result: InferResult, transform: ImageTransform
) -> Classifications:
    """Decode the output, and rank the classes."""
    best = rank(decode_scores(spec, result.outputs), top_k=options.top_k, confidence=options.confidence)
    return Classifications(*best, transform.image_width, transform.image_height, spec, result.version)
