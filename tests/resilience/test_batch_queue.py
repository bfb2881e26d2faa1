"""Images of batches that wait for their turn: behind single requests, within a part of the limit, until their deadline."""

import asyncio

import pytest

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable

LIMIT = 8
PART = LIMIT // 2
PACE = 0.001


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for room of other workers in each round of the event loop."""
    monkeypatch.setattr("app.resilience.wait_queue._POLL_SECONDS", 0)


def open_both(table: WorkerTable, limit: int = LIMIT) -> tuple[ModelQueue, BatchQueue]:
    """Make the queue of a model with this limit, and the line of its batches."""
    queue = ModelQueue(table, "tiny", limit, target_seconds=1e6)
    queue.measure(PACE, 1, is_near=False)
    return queue, BatchQueue(table, queue, "tiny", "")


async def enter(line: BatchQueue, seconds: float = 60) -> Permit:
    """Admit an image, which is in progress until its permit is released."""
    permit = await line.admit(Deadline.after(seconds))
    permit.__enter__()
    return permit


def leave(permit: Permit) -> None:
    permit.__exit__(None, None, None)


async def settle() -> None:
    """Let all pending callbacks of the event loop run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def single(queue: ModelQueue) -> Permit:
    permit = await queue.admit("", 1.0, Deadline.after(60))
    permit.__enter__()
    return permit


async def test_single_requests_go_first(table: WorkerTable) -> None:
    """An image does not take the place for which a single request waits."""
    queue, line = open_both(table)
    singles = [await single(queue) for _ in range(LIMIT)]
    image = asyncio.create_task(enter(line))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(single(queue))
    await asyncio.sleep(0)
    leave(singles.pop())
    await settle()

    assert (waiting.done(), image.done()) == (True, False)
    leave(singles.pop())
    leave(await image)


async def test_a_batch_that_would_come_too_late_is_rejected(table: WorkerTable) -> None:
    """A batch that is alone may try, because nobody is ahead of it."""
    _, line = open_both(table, 2)
    line.check(10_000, 1.0)
    permit = await enter(line)
    others = [asyncio.create_task(enter(line)) for _ in range(100)]
    await asyncio.sleep(0)

    line.check(64, 64.0)
    with pytest.raises(GatewayFull):
        line.check(64, 1e-3)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    line.check(64, 1e-3)
    leave(permit)
