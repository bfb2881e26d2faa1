"""Parse the parameters of a request, which are the same in the query, in form fields and in JSON members.

The parameters of each kind of request are defined by a class.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.errors import InvalidParameter, UnknownModel
from app.expected import expected_value
from app.pipeline.call import Question
from app.pipeline.results import TaskResult

Pair = tuple[str, str | list[str]]
"""Name and value of a parameter; a list only in JSON."""
Pairs = Sequence[Pair]
Fraction = Annotated[float, Meta(ge=0, le=1)]

_LOST_SIGN = re.compile(r" (?=\d\d:?\d\d$)")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ALIASES = {"model_name": "model"}
_IGNORED = {"shared_client", "max_workers", "defer_heavy_ops", "batch_size"}  # choices that OpenProcessor offers its clients
MODEL_NAMES = ("model", "model_name")
_MAX_LENGTH, _MAX_DOCUMENT = 4096, 1 << 15
# Names of the image, for which no similar parameter is suggested.
_IMAGE_NAMES = {"image", "images", "file"}
_OR_ITS_ADDRESS = ", or its address into 'url'"
# Minimum similarity, 0 to 1, of a suggested name; `conf` and `confidence` have 0.57.
_SIMILARITY = 0.55


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every inference request."""

    ignores_unknown: ClassVar[bool] = False
    repeatable: ClassVar[frozenset[str]] = frozenset()
    documents: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that are JSON, as a text or, in a JSON object, as they are."""
    times: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that are times: in a query or a form, a `+` that is not encoded has become a space."""

    timeout_ms: Annotated[
        Annotated[int, Meta(ge=1, le=600_000)] | None,
        Meta(description="Deadline in milliseconds, from the end of the body; 504 when it passes. Default: that of the gateway."),
    ] = None

    truncated: Annotated[
        Literal["refuse", "allow"],
        Meta(description="`allow`: a JPEG whose pixels are not all there is answered as if they were grey; otherwise it gets 422."),
    ] = "refuse"

    @property
    def address(self) -> str | None:
        """The URL of the image; None if the body contains the image, or this kind has no `url`."""
        url: str | None = getattr(self, "url", None)
        return url if url and not url.isspace() else None


class ModelParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request that asks one model, which it may name."""

    model: Annotated[str | None, Meta(description="Model to use; `model_name` is an alias.")] = None
    version: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | None,
        Meta(description="Version of the model, one of those that `/models` lists. Default: the model's default version."),
    ] = None

    def __post_init__(self) -> None:
        if self.model is not None:
            check_model_name(self.model)

    @property
    def options(self) -> Question[TaskResult]:
        """The options of the inference."""
        raise NotImplementedError


P = TypeVar("P", bound=Parameters)


def names(kind: type[Parameters]) -> tuple[str, ...]:
    """Return the names of all parameters of a kind, including aliases."""
    fields = kind.__struct_encode_fields__
    return (*fields, *(alias for alias, name in _ALIASES.items() if name in fields))


def unknown_parameter(name: str, kind: type[Parameters]) -> InvalidParameter:
    """Return the error for an unknown parameter of this kind. It suggests a similar name and lists all names."""
    given = name[:64].lower()
    similar = get_close_matches(given, names(kind), 1, _SIMILARITY) or [known for known in names(kind) if known in given]
    question = f"did you mean {similar[0]!r}? " if similar else ""
    if given in _IMAGE_NAMES:
        question = f"the image belongs into the body{_OR_ITS_ADDRESS if 'url' in kind.__struct_encode_fields__ else ''}; "
    supported = ", ".join(kind.__struct_encode_fields__)
    return InvalidParameter(f"unknown parameter {name[:64]!r}; {question}supported parameters: {supported}")


def split_classes(classes: str | list[str] | None) -> list[str] | None:
    """Split comma-separated names or ids. A list, whose names may have commas, stays as it is, and None: all classes."""
    return [name.strip() for name in classes.split(",") if name.strip()] if isinstance(classes, str) else classes


def parse_parameters(pairs: Pairs, kind: type[P]) -> P:
    """Convert name-value pairs to parameters of a kind; raise InvalidParameter, or UnknownModel for what can be no model's name."""
    if not pairs:
        defaults: P = _defaults(kind)
        return defaults
    values: dict[str, str | list[str]] = {}
    for given, value in pairs:
        name = _ALIASES.get(given, given)
        if name not in kind.__struct_encode_fields__:
            if kind.ignores_unknown or given in _IGNORED:
                continue
            raise unknown_parameter(given, kind)
        if name in values and name not in kind.repeatable:
            raise InvalidParameter(f"{name} is given more than once")
        both = [*_as_list(values.get(name, [])), *_as_list(value)]
        limit = _MAX_DOCUMENT if name in kind.documents else _MAX_LENGTH
        if len(text := ",".join(both)) > limit:
            raise InvalidParameter(f"{name}: longer than {limit} characters")
        text = _LOST_SIGN.sub("+", text) if name in kind.times else text
        values[name] = both if name in kind.repeatable and (name in values or isinstance(value, list)) else text
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`")
        raise InvalidParameter(f"{name}: expected {expected_value(kind, name)}") from error


_defaults = cache(lambda kind: kind())


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def check_model_name(name: str) -> None:
    """Raise UnknownModel for a name that no model can have."""
    if not _MODEL_NAME.fullmatch(name):
        raise UnknownModel("a model's name has 1 to 64 letters, digits, '_', '.' or '-'")
