"""The limit of requests in progress follows the speed of a model, whatever that is."""

import heapq
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from app.resilience import concurrency
from app.resilience.concurrency import BatchTimes, ConcurrencyLimit

TARGET = 1.0
DEADLINE = 2 * TARGET


class Model:
    """A simulated model: instances that each process batches of up to so many images in a fixed time."""

    def __init__(self, instances: int, batch: int, seconds: float, deadline: float = DEADLINE) -> None:
        self.seconds = seconds
        self._batch = batch
        self._deadline = deadline
        self._starts = [-seconds] * instances
        """When the batch of each instance that was filled last starts."""
        self._images = [batch] * instances

    def finish(self, now: float) -> float:
        """Add one image now; return when its batch ends, or when it is dropped because that would not start in time."""
        at = min(range(len(self._starts)), key=lambda index: self._next_start(index, now))
        start = self._next_start(at, now)
        if start - now >= self._deadline:
            return now + self._deadline
        self._images[at] = self._images[at] + 1 if start == self._starts[at] else 1
        self._starts[at] = start
        return start + self.seconds

    def _next_start(self, at: int, now: float) -> float:
        if self._starts[at] >= now and self._images[at] < self._batch:
            return self._starts[at]
        return max(now, self._starts[at] + self.seconds)


class Simulation:
    """Requests for a simulated model, on a simulated clock."""

    def __init__(
        self,
        model: Model,
        monkeypatch: pytest.MonkeyPatch,
        ceiling: float = 1e6,
        initial: float = 8,
        *,
        waits_in_gateway: bool = False,
    ) -> None:
        self.now = 0.0
        self._waits_in_gateway = waits_in_gateway
        monkeypatch.setattr(concurrency, "monotonic", lambda: self.now)
        self.model = model
        self.limit = ConcurrencyLimit(initial, ceiling, TARGET)
        self._running: list[tuple[float, float, int, bool]] = []
        """End, begin and position of each request in progress, and whether it was near the limit."""

    def run(self, seconds: float, clients: float = float("inf")) -> list[float]:
        """Let so many clients send one request after the other; return the durations of the requests that ended."""
        until = self.now + seconds
        durations = []
        while self.now < until:
            while len(self._running) < clients:
                if len(self._running) + 1 > max(1.0, self.limit.value):
                    self.limit.note_reached()
                    break
                position = len(self._running) + 1
                is_near = position >= 0.8 * int(self.limit.value)
                heapq.heappush(self._running, (self.model.finish(self.now), self.now, position, is_near))
            self.now, began, position, is_near = heapq.heappop(self._running)
            call = self.model.seconds
            batch = BatchTimes(self.now - began - call, call) if self._waits_in_gateway else None
            self.limit.add(self.now - began, position, self.limit.value, is_near=is_near, batch=batch)
            durations.append(self.now - began)
        return durations


Simulate = Callable[..., Simulation]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    def make(*model: float, **options: Any) -> Simulation:  # noqa: ANN401 - those of Simulation
        instances, batch, seconds = model
        return Simulation(Model(int(instances), int(batch), seconds), monkeypatch, **options)

    return make


MODELS = pytest.mark.parametrize(
    "model",
    [(1, 1, 0.005), (1, 1, 0.02), (1, 1, 0.2), (4, 1, 0.05), (16, 1, 0.1), (1, 8, 0.1), (1, 64, 0.05), (2, 16, 0.3)],
    ids="{0[0]} instances, batches of {0[1]} in {0[2]} s".format,
)


@MODELS
def test_a_full_gateway_keeps_the_model_busy(simulate: Simulate, model: tuple[float, ...]) -> None:
    simulation = simulate(*model)
    simulation.run(20)
    durations = simulation.run(20)

    instances, batch, seconds = model
    assert len(durations) / 20 > 0.9 * instances * batch / seconds
    assert median(durations) == pytest.approx(TARGET, rel=0.35)
    assert max(durations) < 2 * TARGET


@pytest.mark.parametrize("model", [(1, 8, 0.05), (1, 64, 0.05), (2, 16, 0.03)])
def test_images_wait_for_two_calls_at_most(simulate: Simulate, model: tuple[float, ...]) -> None:
    """More images in the queue would not make the batches larger."""
    simulation = simulate(*model, waits_in_gateway=True)
    simulation.run(20)
    durations = simulation.run(20)

    instances, batch, seconds = model
    assert median(durations) == pytest.approx(3 * seconds, rel=0.35)
    assert len(durations) / 20 > 0.9 * instances * batch / seconds


def test_the_first_request_gives_a_first_estimate(simulate: Simulate) -> None:
    simulation = simulate(1, 1, 0.01)
    simulation.run(0.005, clients=1)

    assert simulation.limit.value == pytest.approx(TARGET / 0.01)
    assert simulation.limit.pace == pytest.approx(0.01)
    assert simulation.limit.duration == pytest.approx(0.01)


@MODELS
def test_the_limit_recovers_after_a_slow_phase(simulate: Simulate, model: tuple[float, ...]) -> None:
    simulation = simulate(*model)
    simulation.run(30)
    before = simulation.limit.value
    simulation.model.seconds *= 5
    simulation.run(60)
    slow = simulation.limit.value
    simulation.model.seconds /= 5
    simulation.run(60)

    assert slow < 0.7 * before
    assert simulation.limit.value == pytest.approx(before, rel=0.4)


@MODELS
def test_a_model_that_becomes_slower_under_a_full_limit_is_kept_busy(simulate: Simulate, model: tuple[float, ...]) -> None:
    simulation = simulate(*model)
    simulation.run(30)
    simulation.model.seconds *= 3
    simulation.run(60)
    durations = simulation.run(20)

    instances, batch, seconds = model
    in_time = [duration for duration in durations if duration < DEADLINE]
    assert len(in_time) / 20 > 0.9 * instances * batch / (3 * seconds)


@pytest.mark.parametrize("model", [(1, 64, 1.2), (8, 1, 1.2)])
def test_a_slow_model_gets_several_requests_if_they_take_no_longer_than_one(simulate: Simulate, model: tuple[float, ...]) -> None:
    """It takes more than the target for a single one, but works in batches or has several instances."""
    simulation = simulate(*model, ceiling=128)
    simulation.run(1, clients=1)
    simulation.run(100)

    assert simulation.limit.value >= 8


def test_a_model_that_is_slower_than_the_target_keeps_a_limit_of_one(simulate: Simulate) -> None:
    simulation = simulate(1, 1, 5 * TARGET)
    simulation.run(200)

    assert simulation.limit.value == 1


@pytest.mark.parametrize("ceiling", [4, 100])
def test_the_limit_never_exceeds_its_ceiling(simulate: Simulate, ceiling: float) -> None:
    simulation = simulate(1, 64, 0.001, ceiling=ceiling)
    assert simulation.limit.value <= ceiling
    simulation.run(0.5)

    assert simulation.limit.value == ceiling


@pytest.mark.parametrize("clients", [1, 4])
def test_the_limit_does_not_grow_while_it_is_not_reached(simulate: Simulate, clients: int) -> None:
    """A few clients say nothing about how many more the model would bear."""
    simulation = simulate(1, 1, 0.02)
    simulation.run(1, clients=1)
    before = simulation.limit.value
    simulation.run(60, clients)

    assert simulation.limit.value == before


def test_slow_requests_lower_the_limit_before_it_is_reached(simulate: Simulate) -> None:
    simulation = simulate(1, 1, 0.01)
    simulation.run(1, clients=1)
    simulation.model.seconds = 0.5
    simulation.run(60, clients=20)

    assert simulation.limit.value < 10


def test_requests_that_began_under_another_limit_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their duration is that of the limit before, so counting them would correct the limit twice."""
    now = 0.0
    monkeypatch.setattr(concurrency, "monotonic", lambda: now)
    limit = ConcurrencyLimit(8, 1000, TARGET)
    limit.value = 100
    limit.pace = 0.01
    now = 10.0
    for _ in range(50):
        limit.add(2 * TARGET, 100, 100, is_near=True)
    assert limit.value == 50
    now = 11.0
    for _ in range(50):
        limit.add(2 * TARGET, 100, 50, is_near=True)

    assert limit.value == 50
