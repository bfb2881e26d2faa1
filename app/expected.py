"""Descriptions of valid values, and suggestions for misspelt names, in error messages; which texts are plain."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from msgspec import inspect

_MAX_QUOTED = 64
_NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def expected_value(kind: type, name: str, unit: str = "") -> str:
    """Describe the valid values of a Struct's field, such as `a number of seconds above 0, up to 600`; a title describes itself."""
    struct = inspect.type_info(kind)
    assert isinstance(struct, inspect.StructType)  # noqa: S101
    return next(_describe(field.type, f" of {unit}" if unit else "") for field in struct.fields if field.encode_name == name)


def _describe(kind: inspect.Type, unit: str) -> str:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            return str((schema or {}).get("title") or _describe(inner, unit))
        case inspect.UnionType(types=types):
            return next(_describe(one, unit) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return f"{'one of ' if len(values) > 1 else ''}{', '.join(map(repr, values))}"
        case inspect.IntType(ge=least, gt=above, le=most) | inspect.FloatType(ge=least, gt=above, le=most):
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{noun}{unit} {f'above {above}, up' if least is None else f'from {least}'} to {most}"
        case inspect.StrType(max_length=int(most)):
            return f"at most {most} characters"
    return "true or false" if isinstance(kind, inspect.BoolType) else "text"


def is_plain(text: str) -> bool:
    """Return whether a text has neither control characters nor halves of characters, such as undecodable bytes of file names."""
    return _NOT_PLAIN.search(text) is None


def quoted(value: str) -> str:
    """Return the end of a message that quotes the beginning of a wrong value; nothing if it may contain a password."""
    return "" if "@" in value else f"; got {value[:_MAX_QUOTED]!r}"


def suggestion(name: str, known: Iterable[str], similarity: float = 0.6, prefix: str = "") -> str:
    """Ask whether the most similar known name was meant, as the end of a message; empty if none is at least so similar, 0 to 1."""
    similar = get_close_matches(name[:_MAX_QUOTED], known, 1, similarity)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""
