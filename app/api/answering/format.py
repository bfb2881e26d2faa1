"""Interface of a response format, and its input."""

from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from litestar.response.base import ASGIResponse

from app.api.answering.schema import BoxFormat
from app.api.context import RequestContext
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline

Found = TypeVar("Found")


class Presentation(NamedTuple):
    """How a caller wants a result to be written."""

    format: str | None = None
    """Name of the format; None to choose it by `Accept`."""
    boxes: BoxFormat = "normalized"
    """Unit and layout of boxes, in formats that let the caller choose."""
    image_id: int = 0
    """The caller's number for the image, in formats that contain one."""


class Answer(NamedTuple, Generic[Found]):
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
    respond: Callable[[Answer[Any]], Awaitable[ASGIResponse]]
    """Makes the response, or raises a GatewayError."""
