"""What handlers are given."""

from typing import Any

from litestar import Request
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from app.detector import Detector

AnyRequest = Request[Any, Any, Any]
TheDetector = NamedDependency[SkipValidation[Detector]]


def the_detector(state: State) -> Detector:
    """Provide the worker's detector, and with it its Triton client; the lifespan made it."""
    detector: Detector = state.detector
    return detector
