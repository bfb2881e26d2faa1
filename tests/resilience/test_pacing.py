"""Rejections and retries are spaced out in time."""

import asyncio
from collections.abc import Sequence

import pytest

from app.resilience.fairness import ANYBODY, Caller
from app.resilience.pacer import Pacer, RejectionPacer
from app.resilience.retry_budget import RetryBudget
from tests.fakes.clock import Clock


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.pacer", "app.resilience.retry_budget")


def test_events_above_a_rate_wait_in_turn_for_a_second_at_most(clock: Clock) -> None:
    paced = Pacer(10)
    for _ in range(3):  # rare ones do not wait
        assert [paced.wait() for _ in range(30)] == pytest.approx([0] * 30, abs=1e-9)
        clock.now += 3
    for _ in range(30):
        paced.wait()
    assert [paced.wait() for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    clock.now += 0.2
    assert paced.wait() == pytest.approx(0.2)
    assert max(paced.wait() for _ in range(1000)) == pytest.approx(1)
    clock.now += 1.2
    assert paced.wait() == 0


async def count_waiting(pacer: RejectionPacer, callers: Sequence[Caller], nbytes: int = 0) -> int:
    """Reject one request of each caller; return how many wait, which then give up."""
    tasks = [asyncio.create_task(pacer.pace(caller, nbytes)) for caller in callers]
    await asyncio.sleep(0)
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return len(waiting)


async def test_caller_with_many_rejections_delays_no_other() -> None:
    pacer = RejectionPacer()
    for number in range(3):  # a burst of three seconds' worth is not delayed
        assert await count_waiting(pacer, [Caller(f"c{number}")] * 150) == 0
    assert await count_waiting(pacer, [Caller("c0")] * 10) == 10
    assert await count_waiting(pacer, [Caller("other")] * 100) == 0


async def test_many_callers_with_few_rejections_wait_together() -> None:
    """As many clients as send from different addresses take as much CPU time as one."""
    assert await count_waiting(RejectionPacer(), [Caller(str(number)) for number in range(1000)]) == 100


@pytest.mark.parametrize(("nbytes", "most"), [(0, 2000), (1 << 20, 64)])
async def test_only_so_many_rejections_wait_with_so_many_bytes(nbytes: int, most: int) -> None:
    pacer = RejectionPacer()
    assert await count_waiting(pacer, [ANYBODY] * 150, nbytes) == 0
    for _ in range(2):
        assert await count_waiting(pacer, [ANYBODY] * (most + 10), nbytes) == most


@pytest.mark.parametrize(
    ("requests", "seconds", "retries"), [(9, 0, 0), (10, 0, 1), (25, 0, 2), (0, 9.9, 0), (0, 10, 1), (0, 3600, 3), (1000, 0, 3)]
)
def test_ten_requests_or_ten_seconds_earn_a_retry(clock: Clock, requests: int, seconds: float, retries: int) -> None:
    """Only a few are saved up: a failure must not begin with a burst of retries."""
    budget = RetryBudget()
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    clock.now += seconds + 0.001
    for _ in range(requests):
        budget.note_request()

    assert [budget.take() for _ in range(retries + 1)] == [True] * retries + [False]
