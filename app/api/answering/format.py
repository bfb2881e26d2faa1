"""Interface of a response format, its input, and the choice of a format by the parameter `format` or the header `Accept`."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from litestar.response.base import ASGIResponse

from app.api.answering.accept import negotiate
from app.api.answering.schema import BoxFormat
from app.api.context import RequestContext
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline

# The most frequent headers, which need no parsing.
_USUAL = {b"", b"*/*", b"application/json", b"application/json, */*", b"application/json, text/plain, */*"}

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
    def names(self) -> tuple[str, ...]:
        """The values of the parameter `format`."""
        return tuple(self._by_name)

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
