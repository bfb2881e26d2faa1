"""What HTTP adds to each task: the parameters of its requests, which OpenAPI describes as well, and the formats of its results."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from app.api.answering import drawn, native
from app.api.answering.format import Format
from app.api.answering.schema import BoxFormat
from app.api.parameters.parse import Fraction, ModelParameters, Pairs, Parameters, names, parse_parameters, split_classes
from app.cascade.definition import Cascade
from app.errors import InvalidParameter, UnknownModel, WrongTask
from app.expected import is_plain
from app.model.heads import DetectionHead, Task
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.call import MAX_DETECTIONS, DetectOptions, TaskOptions
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Classifications, Embedding
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller

DETECTIONS = (native.JSON, drawn.IMAGE, drawn.IMAGE_AND_JSON, native.COCO_RESULTS)
CLASSIFICATIONS = (native.CLASSES_JSON,)

_MAX_ID = 2**53
MAX_ID_LENGTH = 256
ImageId = Annotated[
    str | None,
    Meta(
        description=f"Id of the image in the index, 1 to {MAX_ID_LENGTH} characters without control characters. Default: a new one."
    ),
]
_ImageId = Annotated[int, Meta(ge=0, le=_MAX_ID)]
Url = Annotated[
    str | None,
    Meta(
        description="The https address of the image, instead of the image itself; the gateway fetches it, if it is set up to "
        "fetch from that host."
    ),
]


class DetectionParameters(ModelParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every request for objects with boxes."""

    task: ClassVar[Task] = "detection"
    masks: ClassVar[Literal["polygon", "rle", "png", "none"]] = "polygon"
    repeatable = frozenset({"classes"})

    confidence: Annotated[Fraction, Meta(description="Minimum confidence of a detection. Most models report none below 0.05.")] = (
        0.25
    )
    iou: Annotated[
        Fraction | None,
        Meta(
            description="Overlap, as intersection over union, above which only the better of two boxes of a class is returned. "
            "Default: that of the model; none for a model that finds each object once. "
            "Maximum: that of the model, if it drops such boxes itself."
        ),
    ] = None
    agnostic: Annotated[bool, Meta(description="Whether boxes of different classes are compared, too.")] = False
    classes: Annotated[
        str | list[str] | None,
        Meta(
            description="Names or ids of the classes to return, separated by commas; all by default. Names with commas can be sent "
            "by repeating the parameter, or as a list in JSON."
        ),
    ] = None
    max_detections: Annotated[
        int,
        Meta(ge=1, le=MAX_DETECTIONS, description="Maximum number of detections; those with the highest confidence are returned."),
    ] = 100
    boxes: Annotated[
        BoxFormat,
        Meta(
            description="`normalized`: corners as fractions of the image; `pixel`: corners in pixels; "
            "`coco`: `bbox` as x, y, width, height in pixels; `cxcywh`: `bbox` as centre x, centre y, width, height in pixels."
        ),
    ] = "normalized"
    format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if split_classes(self.classes) == []:
            raise InvalidParameter("classes: expected names or ids, separated by commas")

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return DetectOptions(
            self.model,
            self.confidence,
            split_classes(self.classes),
            self.max_detections,
            self.iou,
            self.agnostic,
            self.version,
            task=self.task,
            masks="rle" if self.format == "coco-results" else self.masks,
        )


class DetectParameters(DetectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a detection request for one image."""

    url: Url = None
    format: Annotated[
        Literal["json", "image", "image_and_json", "coco-results"] | None,
        Meta(
            description="`json`; `image`: the image with the detections drawn on it, as JPEG or what `Accept` prefers; "
            "`image_and_json`: JSON with that picture as base64 in `visualization`; `coco-results`: a list of COCO results. "
            "It counts more than `Accept`, which can ask for `application/json`, `image/jpeg` and `image/png`. Default: `json`."
        ),
    ] = None
    image_id: Annotated[int, Meta(ge=0, le=_MAX_ID, description="With `coco-results`, the `image_id` of each result.")] = 0


class BatchParameters(DetectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a detection request for several images."""

    format: Annotated[
        Literal["json", "coco-results"] | None,
        Meta(
            description="`json`; `coco-results`: one list of COCO results for all images, or an error if any of them fails. "
            "It counts more than `Accept`, which must allow JSON or lines. Default: what `Accept` prefers."
        ),
    ] = None
    image_ids: Annotated[
        str | None,
        Meta(
            description="With `coco-results`, the `image_id` of each image: different whole numbers, separated by commas. "
            "Default: 0, 1, 2 and so on."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_ids is not None:
            _split_ids(self.image_ids)

    def ids_of(self, images: int) -> Sequence[int]:
        """Return the `image_id` of each image; raise InvalidParameter if there are not as many."""
        if self.image_ids is None:
            return range(images)
        ids = _split_ids(self.image_ids)
        if len(ids) != images:
            raise InvalidParameter(f"image_ids: expected {images}, one for each image, found {len(ids)}")
        return ids


class ClassifyParameters(ModelParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a classification request."""

    url: Url = None
    top_k: Annotated[
        int, Meta(ge=1, le=1000, description="Maximum number of classes; those with the highest confidence are returned.")
    ] = 5
    confidence: Annotated[Fraction, Meta(description="Minimum confidence of a class.")] = 0.0
    format: Annotated[Literal["json"] | None, Meta(description="For classes: `json`.")] = None

    @property
    def options(self) -> TaskOptions[Classifications]:
        """The options of the classification."""
        return TaskOptions("classification", self.model, self.confidence, self.top_k, self.version)


class EmbeddingParameters(ModelParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every request for vectors."""

    use_cache: Annotated[bool, Meta(description="Whether a cached result may answer, if the gateway has a cache.")] = True

    @property
    def options(self) -> TaskOptions[Embedding]:
        """The options of the description."""
        return TaskOptions("embedding", self.model, version=self.version)


def check_plain(name: str, text: str | None, length: int = MAX_ID_LENGTH) -> None:
    """Raise InvalidParameter for a parameter that can be no id of an image in the index, or no path of another length."""
    if text is not None and not (0 < len(text) <= length and is_plain(text)):
        raise InvalidParameter(f"{name}: expected 1 to {length} characters, none of them a control character")
    if text is not None and length == MAX_ID_LENGTH and ("/" in text or not text.strip(".")):
        raise InvalidParameter(f"{name}: an id is a part of paths, so it has no slash, and more than dots")


class EmbedParameters(EmbeddingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for the vector of one image."""

    url: Url = None
    index: Annotated[bool, Meta(description="Whether the image is also added to the index; needs the scope `ingest`.")] = False
    image_id: ImageId = None
    format: Annotated[Literal["json"] | None, Meta(description="For a vector: `json`.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index:
            check_plain("image_id", self.image_id)


def _split_ids(text: str) -> list[int]:
    try:
        ids = msgspec.convert([number.strip() for number in text.split(",")], list[_ImageId], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"image_ids: expected whole numbers from 0 to {_MAX_ID}, separated by commas") from error
    if len(set(ids)) < len(ids):
        raise InvalidParameter("image_ids: expected a different number for each image")
    return ids


class TaskForm(NamedTuple):
    """Parameters and response formats of a task."""

    parameters: type[Parameters]
    formats: tuple[Format, ...]
    results: str
    batch: type[BatchParameters] | None = None


_MASKS = Annotated[
    Literal["polygon", "rle", "png", "none"],
    Meta(
        description="`polygon`: the outer contours, each a flat list x, y, x, y, ..., in the unit of `boxes`; `rle`: COCO's "
        "compressed RLE at the size of the image; `png`: a PNG of the box, in base64, which begins at `mask_offset`; "
        "`none`: no masks."
    ),
]


def _objects(task: Task, *fields: tuple[str, Any, Any]) -> TaskForm:
    options: Any = {"namespace": {"task": task}, "frozen": True, "forbid_unknown_fields": True, "kw_only": True}
    single: Any = msgspec.defstruct(f"{task.title()}Parameters", fields, bases=(DetectParameters,), **options)
    several: Any = msgspec.defstruct(f"{task.title()}BatchParameters", fields, bases=(BatchParameters,), **options)
    return TaskForm(single, DETECTIONS, "detections", several)


FORMS: dict[Task, TaskForm] = {
    "detection": TaskForm(DetectParameters, DETECTIONS, "detections", BatchParameters),
    "segmentation": _objects("segmentation", ("masks", _MASKS, "polygon")),
    "pose": _objects("pose"),
    "obb": _objects("obb"),
    "classification": TaskForm(ClassifyParameters, CLASSIFICATIONS, "classifications"),
    "embedding": TaskForm(EmbedParameters, (native.VECTOR_JSON,), "embeddings"),
}


class _CommonParameters(ModelParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str | None = None


class PathModel:
    """Parses the parameters in the query that all tasks share, and finds out the task of the model."""

    def __init__(self, name: str, query: Pairs, pipeline: Pipeline) -> None:
        common = [("model", name), *(pair for pair in query if pair[0] in names(_CommonParameters))]
        self.common: Any = parse_parameters(common, _CommonParameters)
        self._reference = pipeline.refer_to(name, self.common.version)
        self._pipeline = pipeline

    @property
    def kind(self) -> type[Any] | None:
        """The type of the parameters; None if Triton must be asked for the task. Errors are those of `_kind_of`."""
        spec = self._pipeline.tritons.cached(self._reference)
        return None if spec is None else self._kind_of(spec)

    async def find_kind(self, deadline: Deadline, caller: Caller) -> type[Any]:
        """Return the type of the parameters; ask Triton for the task if necessary; errors are those of `Pipeline.prepare`, too."""
        spec = await self._pipeline.prepare(self._reference, deadline, caller)
        return self._kind_of(spec)

    def _kind_of(self, spec: ModelSpec) -> type[Any]:
        head = spec.head
        if head.task not in FORMS:
            raise WrongTask(f"{spec.name} is a {head.noun}, which is asked with others; POST {head.route} does that")
        return FORMS[head.task].parameters


class PathCascade(PathModel):
    """Parses the parameters for a cascade: those that the model of its first step has."""

    def __init__(self, cascade: Cascade, query: Pairs, pipeline: Pipeline) -> None:
        name, version = split_reference(cascade.model)
        self.in_path: Pairs = [("model", name), *([("version", version)] if version else [])]
        self._confidence = next(iter(cascade.steps.values())).confidence
        self._title = f"{name}, the first model of the cascade"
        super().__init__(name, [*query, *self.in_path[1:]], pipeline)

    async def find_kind(self, deadline: Deadline, caller: Caller) -> type[Any]:
        """Return the type of the parameters, as `PathModel` does."""
        try:
            return await super().find_kind(deadline, caller)
        except UnknownModel as error:
            raise UnknownModel(f"{self._title}: {error.detail}") from None

    def _kind_of(self, spec: ModelSpec) -> type[Any]:
        if not isinstance(spec.head, DetectionHead):
            raise WrongTask(f"{self._title}, is a {spec.head.noun}, which finds no boxes")
        kind: Any = super()._kind_of(spec)
        return kind if self._confidence is None else _with_confidence(kind, self._confidence)


@lru_cache(64)
def _with_confidence(kind: Any, confidence: float) -> type[Any]:  # noqa: ANN401 - a type, which can be a key
    field: Any = ("confidence", get_type_hints(kind, include_extras=True)["confidence"], confidence)
    return msgspec.defstruct(kind.__name__, [field], bases=(kind,), frozen=True, forbid_unknown_fields=True, kw_only=True)
