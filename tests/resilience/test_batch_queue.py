"""Images of batches that wait for their turn: behind single requests, within a part of the limit, until their deadline."""

import asyncio

import pytest

from app.errors import DeadlinePassed, GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.support import OpenTable

LIMIT = 8
PART = LIMIT // 2
PACE = 0.001


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for room of other workers in each round of the event loop."""
    monkeypatch.setattr("app.resilience.wait_queue._POLL_SECONDS", 0)


async def settle() -> None:
    """Let all pending callbacks of the event loop run."""
    for _ in range(10):
        await asyncio.sleep(0)


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


async def single(queue: ModelQueue) -> Permit:
    permit = await queue.admit("", 1.0, Deadline.after(60))
    permit.__enter__()
    return permit


async def test_images_of_batches_take_a_part_of_the_limit(table: WorkerTable) -> None:
    """Single requests have the rest at once, however many images wait; those come in their order."""
    queue, line = open_both(table)
    images = [asyncio.create_task(enter(line)) for _ in range(3 * LIMIT)]
    await settle()
    assert [task.done() for task in images] == [True] * PART + [False] * (3 * LIMIT - PART)
    singles = [await single(queue) for _ in range(LIMIT - PART)]
    with pytest.raises(GatewayFull):
        await single(queue)

    for task in images:
        leave(await task)
    await asyncio.sleep(0)
    assert queue.in_progress == len(singles)


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


async def test_an_image_waits_no_longer_than_its_deadline(table: WorkerTable) -> None:
    """The error is a missed deadline, not a full gateway."""
    queue, line = open_both(table)
    singles = [await single(queue) for _ in range(LIMIT)]
    with pytest.raises(DeadlinePassed, match="its turn did not come in time"):
        await enter(line, 0.05)

    for permit in singles:
        leave(permit)
    assert queue.in_progress == 0
    leave(await enter(line))


async def test_an_image_that_leaves_takes_no_place(table: WorkerTable) -> None:
    queue, line = open_both(table, 2)
    first = await enter(line)
    gone, next_one = asyncio.create_task(enter(line)), asyncio.create_task(enter(line))
    await asyncio.sleep(0)
    leave(first)
    await asyncio.sleep(0)
    gone.cancel()
    leave(await next_one)
    await asyncio.gather(gone, return_exceptions=True)
    await settle()

    assert queue.in_progress == 0


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


async def test_all_workers_share_the_part(open_table: OpenTable) -> None:
    (queue, line), (other_queue, other) = open_both(open_table()), open_both(open_table())
    permits = [await enter(line) for _ in range(PART)]
    image = asyncio.create_task(enter(other))
    await settle()
    assert not image.done()
    leave(permits.pop())
    leave(await image)
    for permit in permits:
        leave(permit)

    assert queue.in_progress == other_queue.in_progress == 0


async def test_a_key_with_a_share_has_a_part_of_that(table: WorkerTable) -> None:
    """A batch cannot take what is reserved for others."""
    queue, _ = open_both(table)
    line = BatchQueue(table, queue, "tiny", "camera")
    line.fraction = 0.5
    images = [asyncio.create_task(enter(line)) for _ in range(LIMIT)]
    await settle()

    assert sum(task.done() for task in images) == PART // 2
    for task in images:
        leave(await task)
