"""Interface of a response format, its input, and the choice of a format by the parameter `format` or the header `Accept`."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from litestar.response.base import ASGIResponse

from app.api.answering.schema import BoxFormat
from app.api.context import RequestContext
from app.errors import NotAcceptable
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline

# The most frequent headers, which need no parsing.
_USUAL = {b"", b"*/*", b"application/json", b"application/json, */*", b"application/json, text/plain, */*"}
# More than any program sends.
_MAX_RANGES = 50
_RANGE = re.compile(r"\s*([\w!#$&^.+*-]+/[\w!#$&^.+*-]+)\s*((?:;[^;]*)*)", re.ASCII)
_QUALITY = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.ASCII | re.IGNORECASE)


Found = TypeVar("Found")


class Presentation(NamedTuple):
    """How a caller wants a result to be written."""

    format: str | None = None
    """Name of the format; None to choose it by `Accept`."""
    boxes: BoxFormat = "normalized"
    """Unit and layout of boxes, in formats that let the caller choose."""
    image_id: int = 0
    """The caller's number for the image, in formats that contain one."""


class ResponseInput(NamedTuple, Generic[Found]):
    """The result of one request, and the parts of the request that a format may need."""

    found: Found
    image: bytes
    """The encoded image."""
    presentation: Presentation
    context: RequestContext
    call: CallContext
    pipeline: Pipeline


class Format(NamedTuple):
    """A way to write a result."""

    name: str
    """Value of the parameter `format`."""
    media_types: tuple[str, ...]
    """Values of `Accept` that select this format; the first one is preferred. Empty if it is selected by name only."""
    respond: Callable[[ResponseInput[Any]], Awaitable[ASGIResponse]]
    """Makes the response, or raises a GatewayError."""


class Formats:
    """Formats of one kind of result; the first one is the default."""

    def __init__(self, *formats: Format) -> None:
        self._default = formats[0]
        self._by_name = {format_.name: format_ for format_ in formats}
        self._by_type = {media_type: format_ for format_ in formats for media_type in format_.media_types}

    @property
    def media_types(self) -> tuple[str, ...]:
        """The media types that `Accept` can select."""
        return tuple(self._by_type)

    def choose(self, name: str | None, accept: bytes) -> Format:
        """Choose the format of a result.

        Args:
            name: The value of the parameter `format`, which takes precedence over `Accept`; None if absent.
            accept: The `Accept` header; empty if absent.

        Raises:
            NotAcceptable: The header allows none of the media types.
        """
        if name is not None:
            return self._by_name[name]
        if accept in _USUAL:
            return self._default
        return self._by_type[negotiate(accept, self.media_types)]


def best(accept: bytes, media_types: Sequence[str]) -> str | None:
    """Return the media type that a caller prefers.

    Args:
        accept: The header. A header without any valid media type accepts all types.
        media_types: The available types, in lower case. The first one wins if the caller prefers several equally.

    Returns:
        One of `media_types`; None if the caller accepts none of them.
    """
    qualities = _qualities(accept)
    if not qualities:
        return media_types[0]
    found = {media_type: _quality_of(media_type, qualities) for media_type in media_types}
    chosen = max(found, key=lambda media_type: found[media_type])
    return chosen if found[chosen] > 0 else None


def negotiate(accept: bytes, media_types: Sequence[str]) -> str:
    """Return the media type that a caller prefers; arguments as for `best`.

    Raises:
        NotAcceptable: The caller accepts none of them.
    """
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
