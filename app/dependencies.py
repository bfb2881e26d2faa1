"""What handlers use, from the application they run in.

Litestar's own injection builds and unwinds a group of dependencies in every request; one attribute needs none of it.
"""

from typing import Any

from litestar import Request

from app.detector import Detector

AnyRequest = Request[Any, Any, Any]


def the_detector(request: AnyRequest) -> Detector:
    """Find the worker's detector, and with it its Triton client; the lifespan made it."""
    detector: Detector = request.app.state.detector
    return detector
