"""Images of batches that wait for their turn: behind single requests, within a part of the limit, until their deadline."""

import asyncio

import pytest

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable

LIMIT = 8
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
