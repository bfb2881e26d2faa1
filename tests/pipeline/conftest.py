"""A world for each test, a gate for its threads, what a Triton may refuse an inference with, and inferences that fail."""

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from app.errors import GatewayError
from tests.fakes.triton import SPEC, Refusal
from tests.world import Gate, World, open_world

STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"
SICK = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
RESTRICTED = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted"
FULL = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
LATE = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
MISSHAPEN = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"
FAILED = grpc.StatusCode.INTERNAL, "the model has failed"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world(*kinds, **options): kinds of Tritons, and arguments of `tests.world.open_world`")


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A world made according to the `world` marks of the test and its module; the test's marks take precedence."""
    marks = list(request.node.iter_markers("world"))
    kinds = next((mark.args for mark in marks if mark.args), ())
    options = {name: value for mark in reversed(marks) for name, value in mark.kwargs.items()}
    async with open_world(*(kind() for kind in kinds), **options) as made:
        yield made


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


async def fail(world: World, times: int, refusal: Refusal = STOPPING) -> None:
    for _ in range(times):
        before, world.fake.refusal = world.fake.refusal, refusal
        with pytest.raises(GatewayError):
            await world.infer(spec=SPEC)
        world.fake.refusal = before


def is_closed(world: World, model: str = "tiny") -> bool:
    return world.pool.is_usable(model)
