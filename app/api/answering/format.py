"""Interface of a response format, its input, and the choice of a format by the parameter `format` or the header `Accept`."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from litestar.response.base import ASGIResponse

from app.api.context import RequestContext
from app.errors import NotAcceptable
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline

# More than any program sends.
_MAX_RANGES = 50
_RANGE = re.compile(r"\s*([\w!#$&^.+*-]+/[\w!#$&^.+*-]+)\s*((?:;[^;]*)*)", re.ASCII)
_QUALITY = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.ASCII | re.IGNORECASE)

Found = TypeVar("Found")
Respond = Callable[["ResponseInput[Any]"], Awaitable[ASGIResponse]]
"""Makes the response, or raises a GatewayError."""


class ResponseInput(NamedTuple, Generic[Found]):
    """The result of one request, and the parts of the request that a format may need."""

    found: Found
    image: bytes
    wanted: Any
    """The parameters of the request: `format`, `boxes`, `image_id`, as far as its task has them."""
    context: RequestContext
    call: CallContext
    pipeline: Pipeline
    add_steps: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Of a cascade, adds what its later steps say to the description of its first one's result."""


class Format(NamedTuple):
    """A way to write a result."""

    name: str
    """Value of the parameter `format`."""
    media_types: tuple[str, ...]
    """Values of `Accept` that select this format; the first one is preferred. Empty if it is selected by name only."""
    respond: Respond


def media_types_of(formats: Iterable[Format]) -> dict[str, Format]:
    """Return the media types that `Accept` can select, with their formats."""
    return {media_type: format_ for format_ in formats for media_type in format_.media_types}


def select(formats: Sequence[Format], name: str | None, accept: bytes) -> Format:
    """Choose a format by name, or by the header `Accept` if it is None; raise NotAcceptable if that allows none of them."""
    if name is not None:
        return next(format_ for format_ in formats if format_.name == name)
    by_type = media_types_of(formats)
    return by_type[negotiate(accept, tuple(by_type))]


@lru_cache(64)  # clients send few headers
def best(accept: bytes, media_types: tuple[str, ...]) -> str | None:
    """Return which of these media types, in lower case, a caller prefers, of several the first; None if it accepts none.

    A header without any valid media type accepts all types.
    """
    qualities = _qualities(accept)
    if not qualities:
        return media_types[0]
    found = {media_type: _quality_of(media_type, qualities) for media_type in media_types}
    chosen = max(found, key=lambda media_type: found[media_type])
    return chosen if found[chosen] > 0 else None


def negotiate(accept: bytes, media_types: tuple[str, ...]) -> str:
    """Return the `best` media type; raise NotAcceptable if there is none."""
    media_type = best(accept, media_types)
    if media_type is None:
        raise NotAcceptable(f"Accept allows none of {', '.join(media_types)}; without the header the result is JSON")
    return media_type


def _qualities(accept: bytes) -> dict[str, float]:
    """Return the quality, 0 to 1, of each media type or range."""
    qualities = {}
    for part in accept.decode("latin-1").lower().split(",", _MAX_RANGES)[:_MAX_RANGES]:
        if found := _RANGE.fullmatch(part):
            quality = _QUALITY.search(found[2])
            qualities[found[1]] = float(quality[1]) if quality else 1.0
    return qualities


def _quality_of(media_type: str, qualities: dict[str, float]) -> float:
    """Return the quality of a type, which is the quality of the most specific matching range."""
    ranges = media_type, media_type.partition("/")[0] + "/*", "*/*"
    return next((qualities[name] for name in ranges if name in qualities), 0.0)
