"""What a format is, and what it is given to write."""

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
    """Name of the format; None for what `Accept` says."""
    boxes: BoxFormat = "normalized"
    """How boxes are written, for a format that leaves this to the caller."""
    image_id: int = 0
    """What the caller calls the image, for a format that names it."""


class ResponseInput(NamedTuple, Generic[Found]):
    """The result of one request, and what a format may need of the request."""

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
    """Those that `Accept` may ask for to get this format; the first one is preferred. Empty: it is chosen by name only."""
    respond: Callable[[ResponseInput[Any]], Awaitable[ASGIResponse]]
    """Makes the response; raises a GatewayError if it cannot."""
