"""Events are spaced out in time."""

import asyncio
from collections.abc import Sequence

import pytest

from app.resilience.fairness import ANYBODY, Caller
from app.resilience.pacer import Pacer, RejectionPacer
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.pacer")


def test_rare_events_do_not_wait(clock: Clock) -> None:
    paced = Pacer(10)
    for _ in range(3):
        assert [paced.wait() for _ in range(30)] == pytest.approx([0] * 30, abs=1e-9)
        clock.now += 3


def test_more_events_wait_in_turn(clock: Clock) -> None:
    paced = Pacer(10)
    for _ in range(30):
        paced.wait()

    assert [paced.wait() for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    clock.now += 0.2
    assert paced.wait() == pytest.approx(0.2)


def test_no_event_waits_longer_than_a_second(clock: Clock) -> None:
    paced = Pacer(10)
    assert max(paced.wait() for _ in range(1000)) == pytest.approx(1)
    clock.now += 1.2

    assert paced.wait() == 0


async def waiting_of(pacer: RejectionPacer, callers: Sequence[Caller], nbytes: int = 0) -> list[asyncio.Task[None]]:
    """Reject one request of each caller; return those that wait."""
    tasks = [asyncio.create_task(pacer.pace(caller, nbytes)) for caller in callers]
    await asyncio.sleep(0)
    return [task for task in tasks if not task.done()]


@pytest.mark.usefixtures("clock")
async def test_a_caller_with_many_rejections_delays_no_other() -> None:
    pacer = RejectionPacer()
    for number in range(3):  # a burst of three seconds' worth is not delayed
        assert await waiting_of(pacer, [Caller(f"c{number}")] * 150) == []
    waiting = await waiting_of(pacer, [Caller("c0")] * 10)
    assert len(waiting) == 10

    assert await waiting_of(pacer, [Caller("other")] * 100) == []
    await cancel(waiting)


@pytest.mark.usefixtures("clock")
async def test_many_callers_with_few_rejections_wait_together() -> None:
    """As many clients as send from different addresses take as much CPU time as one."""
    pacer = RejectionPacer()
    waiting = await waiting_of(pacer, [Caller(str(number)) for number in range(1000)])
    assert len(waiting) == 100

    await cancel(waiting)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("nbytes", "most"), [(0, 2000), (1 << 20, 64)])
async def test_only_so_many_rejections_wait_with_so_many_bytes(nbytes: int, most: int) -> None:
    pacer = RejectionPacer()
    assert await waiting_of(pacer, [ANYBODY] * 150, nbytes) == []
    for _ in range(2):
        waiting = await waiting_of(pacer, [ANYBODY] * (most + 10), nbytes)
        assert len(waiting) == most
        await cancel(waiting)


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
