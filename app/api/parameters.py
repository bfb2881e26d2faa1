"""Parse the parameters of a request: the same in the query, in form fields and in JSON members."""

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from app.api.schema import BoxFormat
from app.errors import InvalidParameter, UnknownModel
from app.pipeline.call import DetectOptions

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ALIASES = {"model_name": "model"}
MODEL_NAMES = ("model", "model_name")
"""Names of the parameter that names the model."""
_MAX_LENGTH = 4096


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of one request. The OpenAPI document is generated from the descriptions here."""

    model: Annotated[str | None, Meta(description="Model to use; `model_name` is an alias.")] = None
    confidence: Annotated[float, Meta(ge=0, le=1, description="Minimum confidence of a detection.")] = 0.25
    classes: Annotated[
        str | None, Meta(description="Names or ids of the classes to return, separated by commas; all by default.")
    ] = None
    max_detections: Annotated[
        int, Meta(ge=1, le=300, description="Maximum number of detections; those with the highest confidence are returned.")
    ] = 100
    timeout_ms: Annotated[
        Annotated[int, Meta(ge=1, le=600_000)] | None,
        Meta(description="Deadline in milliseconds, from the end of the body; 504 when it passes. Default: that of the gateway."),
    ] = None
    boxes: Annotated[
        BoxFormat,
        Meta(
            description="`normalized`: corners as fractions of the image; `pixel`: corners in pixels; "
            "`coco`: `bbox` as x, y, width, height in pixels."
        ),
    ] = "normalized"

    url: Annotated[
        str | None,
        Meta(
            description="The https address of the image, instead of the image itself; the gateway fetches it, if it is set up to "
            "fetch from that host."
        ),
    ] = None

    @property
    def options(self) -> DetectOptions:
        """What they ask of the detector."""
        return DetectOptions(self.model, self.confidence, split_classes(self.classes), self.max_detections)


NAMES = (*Parameters.__struct_fields__, *_ALIASES)
"""All names of parameters, including aliases."""


def unknown_parameter(name: str) -> InvalidParameter:
    """Return the error for a name that is not a parameter; it lists those that are."""
    return InvalidParameter(f"unknown parameter {name[:64]!r}; supported parameters: {', '.join(Parameters.__struct_fields__)}")


def split_classes(classes: str | None) -> list[str] | None:
    """Split comma-separated names or ids; None, for all classes, stays None."""
    return None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]


def parse(pairs: Iterable[tuple[str, str]]) -> Parameters:
    """Convert name-value pairs.

    Raises:
        InvalidParameter: A name is unknown or repeated, or a value is not valid.
        UnknownModel: No model can have this name.
    """
    values: dict[str, str] = {}
    for given, value in pairs:
        name = _ALIASES.get(given, given)
        if name not in Parameters.__struct_fields__:
            raise unknown_parameter(given)
        if name in values:
            raise InvalidParameter(f"{name} is given more than once")
        if len(value) > _MAX_LENGTH:
            raise InvalidParameter(f"{name}: longer than {_MAX_LENGTH} characters")
        values[name] = value
    try:
        parameters = msgspec.convert(values, Parameters, strict=False)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$.")
        raise InvalidParameter(f"{field.rstrip('`')}: {message}") from error
    if split_classes(parameters.classes) == []:
        raise InvalidParameter("classes: expected names or ids, separated by commas")
    if parameters.model is not None and not _MODEL_NAME.fullmatch(parameters.model):
        raise UnknownModel("a model's name has 1 to 64 letters, digits, '_', '.' or '-'")
    return parameters
