"""What a caller may ask for, from the query, form fields or JSON members alike."""

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from app.errors import InvalidParameter, UnknownModel
from app.schema import Unit

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ALIASES = {"model_name": "model"}
_MAX_TEXT = 4096


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of one request. The OpenAPI document is made from the descriptions here."""

    model: Annotated[str | None, Meta(description="Model to ask; `model_name` is the same.")] = None
    confidence: Annotated[float, Meta(ge=0, le=1, description="Least score of a detection.")] = 0.25
    classes: Annotated[str | None, Meta(description="Only these classes: names or ids, separated by commas.")] = None
    max_detections: Annotated[int, Meta(ge=1, le=300, description="At most this many, the best.")] = 100
    boxes: Annotated[
        Unit,
        Meta(
            description="`normalized`: corners as fractions of the picture; `pixel`: corners in pixels; "
            "`coco`: `bbox` as x, y, width, height in pixels."
        ),
    ] = "normalized"

    @property
    def wanted_classes(self) -> list[str] | None:
        """The names or ids in `classes`; None for all."""
        return None if self.classes is None else [name.strip() for name in self.classes.split(",") if name.strip()]


NAMES = (*Parameters.__struct_fields__, *_ALIASES)
"""What may be given, aliases too."""


def unknown(name: str) -> InvalidParameter:
    """Say that there is no parameter of this name, and which there are."""
    return InvalidParameter(f"unknown parameter {name[:64]!r}; known are {', '.join(Parameters.__struct_fields__)}")


def parse(pairs: Iterable[tuple[str, str]]) -> Parameters:
    """Convert name-value pairs.

    Raises:
        InvalidParameter: A name is unknown or comes twice, or a value is not valid.
        UnknownModel: The model's name could be none.
    """
    values: dict[str, str] = {}
    for given, value in pairs:
        name = _ALIASES.get(given, given)
        if name not in Parameters.__struct_fields__:
            raise unknown(given)
        if name in values:
            raise InvalidParameter(f"{name} is given more than once")
        if len(value) > _MAX_TEXT:
            raise InvalidParameter(f"{name}: longer than {_MAX_TEXT} characters")
        values[name] = value
    try:
        parameters = msgspec.convert(values, Parameters, strict=False)
    except msgspec.ValidationError as error:
        message, _, field = str(error).partition(" - at `$.")
        raise InvalidParameter(f"{field.rstrip('`')}: {message}") from error
    if parameters.wanted_classes == []:
        raise InvalidParameter("classes: expected names or ids, separated by commas")
    if parameters.model is not None and not _MODEL_NAME.fullmatch(parameters.model):
        raise UnknownModel("a model's name has 1 to 64 letters, digits, '_', '.' or '-'")
    return parameters
