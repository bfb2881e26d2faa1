"""The limit of a simulated model, of which API keys have shares, on a simulated clock."""

import heapq
from itertools import count
from math import inf

import pytest

from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.fakes.clock import Clock
from tests.resilience.test_concurrency import Model

TARGET = 2.5
DEADLINE = 2 * TARGET
SMALL, OTHERS = Caller("small", 0.1, has_share=True), Caller("", 0.9)


class Host:
    """A worker that is alone on its host, and clients that send as many requests as it admits."""

    def __init__(self, model: Model, table: WorkerTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self._clock = Clock(monkeypatch, "app.resilience.model_queue", "app.resilience.concurrency")
        self.queue = ModelQueue(table, "tiny", 128, TARGET)
        self._running: list[tuple[float, int, Permit, float]] = []
        """End of each request in progress, its number, permit and begin."""
        self._numbers = count()

    def run(self, seconds: float, *callers: Caller) -> list[float]:
        """Let the clients of some keys send requests; return the durations of those that ended."""
        until, durations = self._clock.now + seconds, []
        while self._clock.now < until:
            for caller in callers:
                while (permit := self.queue.try_admit(caller)) is not None:
                    now = self._clock.now
                    heapq.heappush(self._running, (self.model.finish(now), next(self._numbers), permit, now))
            self._clock.now, _, permit, began = heapq.heappop(self._running)
            permit.measure()
            permit.release()
            durations.append(self._clock.now - began)
        return durations


MODELS = pytest.mark.parametrize(
    "model", [(1, 1, 0.054), (4, 1, 0.2), (1, 8, 0.4)], ids="{0[0]} instances, batches of {0[1]} in {0[2]} s".format
)


@MODELS
def test_a_key_with_a_small_share_does_not_raise_the_limit(
    table: WorkerTable, monkeypatch: pytest.MonkeyPatch, model: tuple[int, int, float]
) -> None:
    host = Host(Model(*model, inf), table, monkeypatch)
    host.run(60, SMALL, OTHERS)
    before = host.queue.limit
    host.run(60, SMALL)
    limit = host.queue.limit
    durations = host.run(10, SMALL, OTHERS)

    assert limit == pytest.approx(before, rel=0.2)
    assert max(durations) < DEADLINE


@MODELS
def test_the_limit_recovers_while_a_share_is_not_used(
    table: WorkerTable, monkeypatch: pytest.MonkeyPatch, model: tuple[int, int, float]
) -> None:
    half = Caller("", 0.5)
    host = Host(Model(*model, inf), table, monkeypatch)
    host.run(60, half)
    before = host.queue.limit
    host.model.seconds *= 5
    host.run(60, half)
    slow = host.queue.limit
    host.model.seconds /= 5
    host.run(60, half)

    assert slow < 0.7 * before
    assert host.queue.limit == pytest.approx(before, rel=0.4)
