"""What a format is, and what it is given to write."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from litestar.response.base import ASGIResponse

from app.api.context import RequestContext
from app.api.schema import BoxFormat
from app.pipeline.call import CallContext, Detections
from app.pipeline.detector import Detector


class Answer(NamedTuple):
    """The result of one request, and what a format may need of the request."""

    found: Detections
    image: bytes
    """The encoded image."""
    boxes: BoxFormat
    """How boxes are written, for a format that leaves this to the caller."""
    image_id: int
    """What the caller calls the image, for a format that names it."""
    context: RequestContext
    call: CallContext
    detector: Detector


class Format(NamedTuple):
    """A way to write a result."""

    name: str
    """Value of the parameter `format`."""
    media_types: tuple[str, ...]
    """Those that `Accept` may ask for to get this format; the first one is preferred. Empty: it is chosen by name only."""
    respond: Callable[[Answer], Awaitable[ASGIResponse]]
    """Makes the response; raises a GatewayError if it cannot."""
