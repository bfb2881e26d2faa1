"""One call of the detector: what the caller asks for, what goes with it, and what comes out."""

from asyncio import Semaphore
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.resilience.admission import WHOLE, Share
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext


class DetectOptions(NamedTuple):
    """What the caller asks for."""

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
    turns: Semaphore | None = None
    """Limits how many images of batches wait for a thread, so that single ones need not wait behind all of them."""


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
