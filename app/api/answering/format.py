"""Interface of a response format, its input, and the choice of a format by the parameter `format` or the header `Accept`."""

import re
from collections.abc import Awaitable, Callable
from functools import cache, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from litestar.response.base import ASGIResponse

from app.api.context import RequestContext
from app.errors import NotAcceptable
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline

_ALIASES = {"image/jpg": "image/jpeg"}
# More than any program sends.
_MAX_RANGES = 50
_RANGE = re.compile(r"\s*([\w!#$&^.+*-]+/[\w!#$&^.+*-]+)\s*((?:;[^;]*)*)", re.ASCII)
_QUALITY = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.ASCII | re.IGNORECASE)

Found = TypeVar("Found")
Respond = Callable[["ResponseInput[Any]"], Awaitable[ASGIResponse]]


class ResponseInput(NamedTuple, Generic[Found]):
    """The result of one request, and the parts of the request that a format may need."""

    found: Found
    image: bytes
    wanted: Any
    context: RequestContext
    call: CallContext
    pipeline: Pipeline
    add_steps: Callable[[dict[str, Any]], dict[str, Any]] | None = None


class Format(NamedTuple):
    """A way to write a result."""

    name: str
    media_types: tuple[str, ...]
    """Values of `Accept` that select this format; the first one is preferred. Empty if it is selected by name only."""
    respond: Respond


@cache
def media_types_of(formats: tuple[Format, ...]) -> dict[str, Format]:
    """Return the media types that `Accept` can select, with their formats."""
    return {media_type: format_ for format_ in formats for media_type in format_.media_types}


def select(formats: tuple[Format, ...], name: str | None, accept: bytes) -> Format:
    """Choose a format by name, or by the header `Accept` if it is None; raise NotAcceptable if that allows none of them."""
    if name is not None:
        return next(format_ for format_ in formats if format_.name == name)
    by_type = media_types_of(formats)
    return by_type[negotiate(accept, tuple(by_type))]


@lru_cache(64)  # clients send few headers
def best(accept: bytes, media_types: tuple[str, ...]) -> str | None:
    """Return the media type that a caller prefers, the first of several; None if it accepts none. An invalid header accepts all."""
    qualities = _qualities(accept)
    if not qualities:
        return media_types[0]
    ranges = {media_type: (media_type, media_type.partition("/")[0] + "/*", "*/*") for media_type in media_types}
    found = {each: next((qualities[name] for name in names if name in qualities), 0.0) for each, names in ranges.items()}
    chosen = max(found, key=lambda media_type: found[media_type])
    return chosen if found[chosen] > 0 else None


def negotiate(accept: bytes, media_types: tuple[str, ...]) -> str:
    """Return the `best` media type; raise NotAcceptable if there is none."""
    media_type = best(accept, media_types)
    if media_type is None:
        raise NotAcceptable(f"Accept allows none of {', '.join(media_types)}; without the header the result is JSON")
    return media_type


def _qualities(accept: bytes) -> dict[str, float]:
    qualities = {}
    for part in accept.decode("latin-1").lower().split(",", _MAX_RANGES)[:_MAX_RANGES]:
        if found := _RANGE.fullmatch(part):
            quality = _QUALITY.search(found[2])
            qualities[_ALIASES.get(found[1], found[1])] = float(quality[1]) if quality else 1.0
    return qualities
