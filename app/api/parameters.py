"""Parse the parameters of a request: the same in the query, in form fields and in JSON members.

Each kind of request has a class of parameters, which says all that is known of them; the OpenAPI document is generated from it.
"""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.api.expectations import expected_value
from app.api.formats.answer import Presentation
from app.api.formats.choice import ClassesFormatName, FormatName
from app.api.schema import BoxFormat
from app.errors import InvalidParameter, UnknownModel
from app.pipeline.call import Classifications, ClassifyOptions, Detections, DetectOptions, Question
from app.remote.address import is_empty

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ALIASES = {"model_name": "model"}
MODEL_NAMES = ("model", "model_name")
"""Names of the parameter that names the model."""
_MAX_LENGTH = 4096
_MAX_ID = 2**53
"""Up to which JavaScript's numbers are exact."""
_ImageId = Annotated[int, Meta(ge=0, le=_MAX_ID)]
# Parameters have similar names, which are not what is meant.
_IMAGE_NAMES = {"image", "images", "file"}
_OR_ITS_ADDRESS = ", or its address into 'url'"
# Below a half, names have little in common; `conf` for `confidence` is just above.
_SIMILARITY = 0.55


_Url = Annotated[
    str | None,
    Meta(
        description="The https address of the image, instead of the image itself; the gateway fetches it, if it is set up to "
        "fetch from that host."
    ),
]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of every request for an inference."""

    ignores_unknown: ClassVar[bool] = False
    """Whether a request may have parameters of other names."""

    model: Annotated[str | None, Meta(description="Model to use; `model_name` is an alias.")] = None
    version: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | None,
        Meta(description="Version of the model, one of those that `/models` lists. Default: the newest."),
    ] = None
    timeout_ms: Annotated[
        Annotated[int, Meta(ge=1, le=600_000)] | None,
        Meta(description="Deadline in milliseconds, from the end of the body; 504 when it passes. Default: that of the gateway."),
    ] = None

    def __post_init__(self) -> None:
        """Check what a type cannot tell.

        Raises:
            UnknownModel: No model can have this name.
        """
        if self.model is not None:
            check_model_name(self.model)

    @property
    def options(self) -> Question[Detections | Classifications]:
        """What they ask of the model."""
        raise NotImplementedError

    @property
    def address(self) -> str | None:
        """Where the image is to be fetched; None if the body has it, or the kind has no `url`."""
        url: str | None = getattr(self, "url", None)
        return None if url is None or is_empty(url) else url

    @property
    def presentation(self) -> Presentation:
        """How the answer is to be written."""
        return Presentation()


class DetectionParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of every request for detections."""

    confidence: Annotated[float, Meta(ge=0, le=1, description="Minimum confidence of a detection.")] = 0.25
    iou: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Overlap, as intersection over union, above which only the better of two boxes of a class is returned. "
            "Default: that of the model; none for a model that finds each object once. "
            "Maximum: that of the model, if it drops such boxes itself."
        ),
    ] = None
    agnostic: Annotated[bool, Meta(description="Whether boxes of different classes are compared, too.")] = False
    classes: Annotated[
        str | None, Meta(description="Names or ids of the classes to return, separated by commas; all by default.")
    ] = None
    max_detections: Annotated[
        int, Meta(ge=1, le=300, description="Maximum number of detections; those with the highest confidence are returned.")
    ] = 100
    boxes: Annotated[
        BoxFormat,
        Meta(
            description="`normalized`: corners as fractions of the image; `pixel`: corners in pixels; "
            "`coco`: `bbox` as x, y, width, height in pixels; `cxcywh`: `bbox` as centre x, centre y, width, height in pixels."
        ),
    ] = "normalized"

    def __post_init__(self) -> None:
        """Check what a type cannot tell.

        Raises:
            UnknownModel: No model can have this name.
            InvalidParameter: There are no classes in the list of classes.
        """
        super().__post_init__()
        if split_classes(self.classes) == []:
            raise InvalidParameter("classes: expected names or ids, separated by commas")

    @property
    def options(self) -> DetectOptions:
        """What they ask of the model."""
        return DetectOptions(
            self.model, self.confidence, split_classes(self.classes), self.max_detections, self.iou, self.agnostic, self.version
        )


class DetectParameters(DetectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of a request for detections in one image."""

    url: _Url = None
    format: Annotated[
        FormatName | None,
        Meta(
            description="`json`; `image`: the image with boxes, names and scores drawn on it, as JPEG or what `Accept` prefers; "
            "`image_and_json`: JSON with that picture as base64 in `visualization`; `coco-results`: a list of COCO results. "
            "It counts more than `Accept`, which can ask for `application/json`, `image/jpeg` and `image/png`. Default: `json`."
        ),
    ] = None
    image_id: Annotated[int, Meta(ge=0, le=_MAX_ID, description="With `coco-results`, the `image_id` of each result.")] = 0

    @property
    def presentation(self) -> Presentation:
        """How the answer is to be written."""
        return Presentation(self.format, self.boxes, self.image_id)


class BatchParameters(DetectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of a request for detections in several images."""

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
        """Check what a type cannot tell.

        Raises:
            UnknownModel: No model can have this name.
            InvalidParameter: A list is empty, or has something else than numbers, or the same number twice.
        """
        super().__post_init__()
        if self.image_ids is not None:
            _split_ids(self.image_ids)

    def ids_of(self, images: int) -> Sequence[int]:
        """Return the `image_id` of each of so many images.

        Raises:
            InvalidParameter: There are more or fewer of them.
        """
        if self.image_ids is None:
            return range(images)
        ids = _split_ids(self.image_ids)
        if len(ids) != images:
            raise InvalidParameter(f"image_ids: expected {images}, one for each image, found {len(ids)}")
        return ids


class ClassifyParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of a request for classes."""

    url: _Url = None
    top_k: Annotated[
        int, Meta(ge=1, le=1000, description="Maximum number of classes; those with the highest confidence are returned.")
    ] = 5
    confidence: Annotated[float, Meta(ge=0, le=1, description="Minimum confidence of a class.")] = 0.0
    format: Annotated[ClassesFormatName | None, Meta(description="For classes: `json`.")] = None

    @property
    def options(self) -> ClassifyOptions:
        """What they ask of the model."""
        return ClassifyOptions(self.model, self.confidence, self.top_k, self.version)

    @property
    def presentation(self) -> Presentation:
        """How the answer is to be written."""
        return Presentation(self.format)


P = TypeVar("P", bound=Parameters)


def names(kind: type[Parameters]) -> tuple[str, ...]:
    """Return all names of a kind's parameters, including aliases."""
    return (*kind.__struct_fields__, *_ALIASES)


def unknown_parameter(name: str, kind: type[Parameters]) -> InvalidParameter:
    """Return the error for a name that is not a parameter of this kind; it suggests a similar one, and lists all."""
    given = name[:64].lower()
    similar = get_close_matches(given, names(kind), 1, _SIMILARITY) or [known for known in names(kind) if known in given]
    question = f"did you mean {similar[0]!r}? " if similar else ""
    if given in _IMAGE_NAMES:
        question = f"the image belongs into the body{_OR_ITS_ADDRESS if 'url' in kind.__struct_fields__ else ''}; "
    supported = ", ".join(kind.__struct_fields__)
    return InvalidParameter(f"unknown parameter {name[:64]!r}; {question}supported parameters: {supported}")


def split_classes(classes: str | None) -> list[str] | None:
    """Split comma-separated names or ids; None, for all classes, stays None."""
    return None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]


def _split_ids(text: str) -> list[int]:
    """Split comma-separated numbers of images, all of which differ: results of two images could not be told apart."""
    try:
        ids = msgspec.convert([number.strip() for number in text.split(",")], list[_ImageId], strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"image_ids: expected whole numbers from 0 to {_MAX_ID}, separated by commas") from error
    if len(set(ids)) < len(ids):
        raise InvalidParameter("image_ids: expected a different number for each image")
    return ids


def parse(pairs: Collection[tuple[str, str]], kind: type[P]) -> P:
    """Convert name-value pairs to parameters of a kind.

    Args:
        pairs: Of one request.
        kind: The parameters of its task.

    Raises:
        InvalidParameter: A name is unknown or repeated, or a value is not valid.
        UnknownModel: No model can have this name.
    """
    if not pairs:
        defaults: P = _defaults(kind)
        return defaults
    values: dict[str, str] = {}
    for given, value in pairs:
        name = _ALIASES.get(given, given)
        if name not in kind.__struct_fields__:
            if kind.ignores_unknown:
                continue
            raise unknown_parameter(given, kind)
        if name in values:
            raise InvalidParameter(f"{name} is given more than once")
        if len(value) > _MAX_LENGTH:
            raise InvalidParameter(f"{name}: longer than {_MAX_LENGTH} characters")
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`")
        raise InvalidParameter(f"{name}: expected {expected_value(kind, name)}") from error


_defaults = cache(lambda kind: kind())


def check_model_name(name: str) -> None:
    """Reject a name that no model can have.

    Raises:
        UnknownModel: It is one.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise UnknownModel("a model's name has 1 to 64 letters, digits, '_', '.' or '-'")
