"""The JSON of the responses."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.model.heads import Task
from app.pipeline.results import TaskResult

BoxFormat = Literal["normalized", "pixel", "coco", "cxcywh"]


class Rle(msgspec.Struct, frozen=True):
    """A mask in COCO's compressed run-length encoding."""

    size: tuple[int, int]
    """Height and width of the upright image."""
    counts: str


class Keypoint(msgspec.Struct, frozen=True):
    """A keypoint, in the unit of the box's corners."""

    x: float
    y: float
    confidence: float | UnsetType
    """From 0 to 1; absent if the model reports none."""
    name: str


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One object: corners in the requested unit, or a `bbox` in pixels, never both.

    Both are relative to the top left of the upright image. `bbox` is x, y, width, height: for `coco`, x and y are the top left
    corner, as in COCO files; for `cxcywh`, the centre.
    """

    x1: float | UnsetType = UNSET
    y1: float | UnsetType = UNSET
    x2: float | UnsetType = UNSET
    y2: float | UnsetType = UNSET
    bbox: tuple[float, float, float, float] | UnsetType = UNSET
    confidence: float
    class_: int = msgspec.field(name="class")
    class_id: int
    class_name: str
    mask: list[list[float]] | Rle | bytes | UnsetType = UNSET
    """Of a segmentation: polygons x, y, x, y, ..., in the unit of the box's corners; an RLE; or a PNG in base64."""
    mask_offset: tuple[int, int] | UnsetType = UNSET
    """Column and row of the image at which the PNG begins."""
    keypoints: list[Keypoint] | UnsetType = UNSET
    rotation: float | UnsetType = UNSET
    """Of an oriented box: the angle of its first edge, a long one, in radians from 0 to pi, clockwise."""
    corners: list[tuple[float, float]] | UnsetType = UNSET
    """Of an oriented box: its corners, clockwise, in the unit of the box's corners; they may lie outside of the image."""


class ImageSize(msgspec.Struct, frozen=True):
    """The upright image (EXIF orientation applied), in pixels."""

    width: int
    height: int


class ModelUsed(msgspec.Struct, frozen=True):
    """The model that produced the result, and its device."""

    name: str
    version: str
    backend: str
    device: Literal["cpu", "gpu"]

    @classmethod
    def of(cls, found: TaskResult) -> "ModelUsed":
        """Describe the model that produced a result."""
        return cls(found.spec.name, found.version, "triton", found.spec.device)


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer ends with."""

    total_time_ms: float
    request_id: str


class ResultOfModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer of one model about one image ends with."""

    status: Literal["success"]
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str


class DetectResponse(ResultOfModel, frozen=True):
    """Detections, by descending confidence."""

    detections: list[Detection]
    num_detections: int
    visualization: bytes | UnsetType = UNSET


class CocoResult(msgspec.Struct, frozen=True):
    """One object as a COCO result; `bbox` is x, y, width, height in pixels of the upright image."""

    image_id: int
    category_id: int
    """The model's class id, from 0."""
    bbox: tuple[float, float, float, float]
    score: float
    segmentation: Rle | list[list[float]] | UnsetType = UNSET
    keypoints: list[float] | UnsetType = UNSET
    """x, y in pixels and the confidence of each keypoint."""


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """One class with its confidence."""

    class_: int = msgspec.field(name="class")
    class_id: int
    class_name: str
    confidence: float


class ClassifyResponse(ResultOfModel, frozen=True):
    """Classes, by descending confidence."""

    classifications: list[Classification]
    num_classifications: int


class EmbedResponse(ResultOfModel, frozen=True):
    """The vector that describes an image."""

    embedding: list[float]
    """Of length 1. Its size is that of the model; only vectors of the same model can be compared."""
    embedding_norm: float
    """Length of the model's own vector."""
    image_id: str | None
    indexed: bool


class Problem(msgspec.Struct, frozen=True):
    """An error as in RFC 9457 (`application/problem+json`)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    """A model in Triton's repository, or one that `pull` can download."""

    name: str
    state: Literal["ready", "not_ready", "not_loaded", "not_pulled", "no_config", "invalid", "unloadable"]
    version: str | None = None
    """The default version: the newest one, unless the model's config names another."""
    versions: list[str] = []
    width: int | None = None
    height: int | None = None
    shapes: list[tuple[int, int]] = []
    """Width and height of the smaller inputs that images get if they fit; empty if all get `width` and `height`."""
    task: Task | None = None
    output_format: str | None = None
    device: Literal["cpu", "gpu"] | None = None
    classes: list[str] = []
    keypoints: list[str] = []
    source: str | None = None
    licence: str | None = None
    detail: str | None = None
    status: str = "UNAVAILABLE"
    """Triton's state of the model, such as `READY`; `UNAVAILABLE` also if Triton does not have the model or reports no state."""
    backend: str | None = None
    max_batch_size: int | None = None
    has_labels: bool = False
    num_classes: int | None = None
    input_shape: list[int] | None = None
    box_units: Literal["pixels", "normalized"] | None = None
    """Unit of a detector's boxes in the model's output; null if nothing tells it, and pixels are assumed, and for other models."""
    checked: bool | None = None
    """Whether the version was seen to find something when it was added; null for a model that was not added."""


class ModelCard(msgspec.Struct, frozen=True):
    """A model in the format of OpenAI's model list, which many clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "nereid"


class StepInfo(msgspec.Struct, frozen=True):
    """A step of a cascade."""

    name: str
    model: str
    of: str | None


class CascadeInfo(msgspec.Struct, frozen=True):
    """A cascade of the file `cascades.toml`, which `/predict/{name}` asks."""

    name: str
    title: str
    steps: list[StepInfo]


class ModelList(msgspec.Struct, frozen=True):
    """All models, by name."""

    default: str
    models: list[ModelInfo]
    total: int
    data: list[ModelCard]
    object: Literal["list"] = "list"
    triton_status: Literal["READY"] = "READY"
    """Constant: without Triton the response is 503."""
    cascades: list[CascadeInfo] = []
