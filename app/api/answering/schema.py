"""The JSON of the responses."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.model.heads import Task
from app.pipeline.call import Classifications, Detections

BoxFormat = Literal["normalized", "pixel", "coco", "cxcywh"]
"""How boxes are written."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One object: corners in the unit the caller asked for, or a `bbox` in pixels, never both.

    Both are relative to the top left of the upright image. `bbox` is x, y, width, height: of `coco`, x and y are the top left
    corner, as in COCO files; of `cxcywh`, the centre.
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


class ImageSize(msgspec.Struct, frozen=True):
    """The upright image (EXIF orientation applied), in pixels."""

    width: int
    height: int


class ModelUsed(msgspec.Struct, frozen=True):
    """The model that answered, and its device."""

    name: str
    version: str
    backend: str
    device: Literal["cpu", "gpu"]

    @classmethod
    def of(cls, found: Detections | Classifications) -> "ModelUsed":
        """Describe the model that found this."""
        return cls(found.spec.name, found.version, "triton", found.spec.device)


class DetectResponse(msgspec.Struct, frozen=True):
    """Detections by descending confidence."""

    detections: list[Detection]
    num_detections: int
    status: Literal["success"]
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str
    visualization: bytes | UnsetType = UNSET
    """The picture with the detections drawn on it, in base64; for `format=image_and_json` only."""


class CocoResult(msgspec.Struct, frozen=True):
    """One object as in the results of COCO; `bbox` is x, y, width, height in pixels of the upright image."""

    image_id: int
    category_id: int
    """The class id of the model, from 0."""
    bbox: tuple[float, float, float, float]
    score: float


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """One class that the image may show."""

    class_: int = msgspec.field(name="class")
    class_id: int
    class_name: str
    confidence: float


class ClassifyResponse(msgspec.Struct, frozen=True):
    """Classes by descending confidence."""

    classifications: list[Classification]
    num_classifications: int
    status: Literal["success"]
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str


class Problem(msgspec.Struct, frozen=True):
    """An error as in RFC 9457 (`application/problem+json`)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that Triton knows or that `pull` can get."""

    name: str
    state: Literal["ready", "not_ready", "not_pulled"]
    version: str | None = None
    """The version that answers, unless a request asks for another one: the newest."""
    versions: list[str] = []
    """All that are ready, ascending."""
    width: int | None = None
    height: int | None = None
    task: Task | None = None
    output_format: str | None = None
    device: Literal["cpu", "gpu"] | None = None
    classes: list[str] = []
    source: str | None = None
    licence: str | None = None
    detail: str | None = None
    status: str | None = None
    """Its state as Triton names it, such as `READY`; null if Triton does not have it, or does not tell."""
    backend: str | None = None
    """What runs it in Triton."""
    max_batch_size: int | None = None
    has_labels: bool = False
    num_classes: int | None = None
    input_shape: list[int] | None = None
    """Of one image, without the batch dimension."""


class ModelCard(msgspec.Struct, frozen=True):
    """A model as OpenAI's API lists it, which many clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "nereid"


class ModelList(msgspec.Struct, frozen=True):
    """All models, by name."""

    default: str
    models: list[ModelInfo]
    total: int
    data: list[ModelCard]
    """Those that are ready; the default model is the first, if it is one of them."""
    object: Literal["list"] = "list"
    triton_status: Literal["READY"] = "READY"
    """Without Triton there is no list; the answer is 503."""
