"""What handlers receive by dependency injection. The lifespan puts it into the application's state."""

from litestar.datastructures import State
from litestar.di import Provide

from app.pipeline.detector import Detector
from app.triton.client import TritonClient


def provide_triton(state: State) -> TritonClient:
    """Provide the worker's one Triton client."""
    client: TritonClient = state.triton
    return client


def provide_detector(state: State) -> Detector:
    """Provide the worker's detector."""
    detector: Detector = state.detector
    return detector


def providers() -> dict[str, Provide]:
    """Return the dependencies of one application, by parameter name; each is provided once and then cached."""
    return {
        "triton": Provide(provide_triton, use_cache=True, sync_to_thread=False),
        "detector": Provide(provide_detector, use_cache=True, sync_to_thread=False),
    }
