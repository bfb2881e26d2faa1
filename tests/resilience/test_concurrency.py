"""The limit of requests in progress follows the speed of a model, whatever that is."""

import heapq
from math import inf
from statistics import median

import pytest

from app.resilience.concurrency import BatchTimes, ConcurrencyLimit
from tests.fakes.clock import Clock

TARGET = 1.0
DEADLINE = 2 * TARGET


class Model:
    """A simulated model: instances that each process batches of up to so many images in a fixed time."""

    def __init__(self, instances: int, batch: int, seconds: float) -> None:
        self.seconds = seconds
        self.instances, self.batch = instances, batch
        self._starts = [-seconds] * instances
        """When the batch of each instance that was filled last starts."""
        self._images = [batch] * instances

    @property
    def speed(self) -> float:
        """Images per second at most."""
        return self.instances * self.batch / self.seconds

    def finish(self, now: float) -> float:
        """Add one image now; return when its batch ends, or when it is dropped because that would not start in time."""
        at = min(range(self.instances), key=lambda index: self._next_start(index, now))
        start = self._next_start(at, now)
        if start - now >= DEADLINE:
            return now + DEADLINE
        self._images[at] = self._images[at] + 1 if start == self._starts[at] else 1
        self._starts[at] = start
        return start + self.seconds

    def _next_start(self, at: int, now: float) -> float:
        if self._starts[at] >= now and self._images[at] < self.batch:
            return self._starts[at]
        return max(now, self._starts[at] + self.seconds)


class Simulation:
    """Requests for a simulated model, on a simulated clock."""

    def __init__(self, clock: Clock, model: Model, ceiling: float = 1e6) -> None:
        self.clock = clock
        self.model = model
        self.limit = ConcurrencyLimit(8, ceiling, TARGET)
        self._running: list[tuple[float, float, int, bool]] = []
        """End, begin and position of each request in progress, and whether it was near the limit."""

    def run(self, seconds: float, clients: float = inf, *, waits_in_gateway: bool = False) -> list[float]:
        """Let so many clients send one request after the other; return the durations of the requests that ended."""
        until = self.clock.now + seconds
        durations = []
        while self.clock.now < until:
            while len(self._running) < clients:
                if len(self._running) + 1 > max(1.0, self.limit.value):
                    self.limit.note_reached()
                    break
                now, position = self.clock.now, len(self._running) + 1
                is_near = position >= 0.8 * int(self.limit.value)
                heapq.heappush(self._running, (self.model.finish(now), now, position, is_near))
            self.clock.now, began, position, is_near = heapq.heappop(self._running)
            durations.append(self.clock.now - began)
            call = self.model.seconds
            batch = BatchTimes(durations[-1] - call, call) if waits_in_gateway else None
            self.limit.add(durations[-1], position, self.limit.value, is_near=is_near, batch=batch)
        return durations


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch, "app.resilience.concurrency")
    clock.now = 0.0  # so that times that are equal are found equal
    return clock


MODELS = pytest.mark.parametrize(
    "model",
    [(1, 1, 0.005), (16, 1, 0.1), (2, 16, 0.3)],
    ids="{0[0]} instances, batches of {0[1]} in {0[2]} s".format,
)


@MODELS
def test_limit_follows_a_model_that_becomes_slower_and_recovers(clock: Clock, model: tuple[int, int, float]) -> None:
    simulation = Simulation(clock, Model(*model))
    simulation.run(20)
    durations = simulation.run(20)
    assert len(durations) / 20 > 0.9 * simulation.model.speed
    assert median(durations) == pytest.approx(TARGET, rel=0.35)
    assert max(durations) < DEADLINE
    before = simulation.limit.value
    simulation.model.seconds *= 3
    simulation.run(60)
    in_time = [duration for duration in simulation.run(20) if duration < DEADLINE]
    assert len(in_time) / 20 > 0.9 * simulation.model.speed
    assert simulation.limit.value < 0.7 * before
    simulation.model.seconds /= 3
    simulation.run(60)

    assert simulation.limit.value == pytest.approx(before, rel=0.4)


@pytest.mark.parametrize("model", [(1, 64, 0.05), (2, 16, 0.03)])
def test_images_wait_for_two_calls_at_most(clock: Clock, model: tuple[int, int, float]) -> None:
    """More images in the queue would not make the batches larger."""
    simulation = Simulation(clock, Model(*model))
    simulation.run(20, waits_in_gateway=True)
    durations = simulation.run(20, waits_in_gateway=True)

    assert median(durations) == pytest.approx(3 * simulation.model.seconds, rel=0.35)
    assert len(durations) / 20 > 0.9 * simulation.model.speed


@pytest.mark.parametrize(
    ("model", "ceiling", "runs", "least", "most"),
    [
        ((1, 1, 0.01), 1e6, [(0.005, 1)], 100, 100),  # the first request gives a first estimate
        ((1, 64, 1.2), 128, [(1, 1), (100, inf)], 8, 128),  # slower than the target, but several take no longer than one
        ((1, 1, 5.0), 128, [(200, inf)], 1, 1),
        ((1, 64, 0.001), 4, [(0.5, inf)], 4, 4),
        ((1, 1, 0.02), 1e6, [(1, 1), (60, 4)], 50, 50),  # a few clients say nothing about how many more it would bear
    ],
)
def test_limit_is_as_high_as_the_model_bears(  # noqa: PLR0913, PLR0917 - a table
    clock: Clock, model: tuple[int, int, float], ceiling: float, runs: list[tuple[float, float]], least: float, most: float
) -> None:
    simulation = Simulation(clock, Model(*model), ceiling)
    for seconds, clients in runs:
        simulation.run(seconds, clients)

    assert least - 1e-9 <= simulation.limit.value <= most + 1e-9
