"""Images of batches that wait for their turn: behind single requests, within a part of the limit, until their deadline."""

import asyncio

import pytest

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.fakes.clock import Clock

LIMIT = 8
PACE = 0.001


def open_both(table: WorkerTable, limit: int = LIMIT) -> tuple[ModelQueue, BatchQueue]:
    """Make the queue of a model with this limit, and the line of its batches."""
    queue = ModelQueue(table, "tiny", limit, target_seconds=1e6)
    queue.measure(PACE, 1, is_near=False)
    return queue, BatchQueue(queue, ANYBODY)


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


@pytest.mark.parametrize(("images", "ahead"), [(64, 128), (8, 16), (1000, 1100)])
async def test_images_of_others_that_wait_can_make_a_batch_late(
    table: WorkerTable, monkeypatch: pytest.MonkeyPatch, images: int, ahead: int
) -> None:
    Clock(monkeypatch, "app.resilience.model_queue")
    queue, line = open_both(table)
    other = BatchQueue(queue, Caller("other"))
    permits = [await enter(other) for _ in range(LIMIT // 2)]
    waiting = [asyncio.create_task(enter(other)) for _ in range(100)]
    await asyncio.sleep(0)

    line.check(images, 1.01 * ahead * PACE)
    with pytest.raises(GatewayFull):
        line.check(images, 0.99 * ahead * PACE)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for permit in permits:
        leave(permit)


async def test_parts_of_an_image_that_is_answered_in_part_come_before_other_images(table: WorkerTable) -> None:
    _, line = open_both(table, 2)
    permit = await enter(line)
    order = []

    async def wait(*, is_later_step: bool) -> None:
        with await line.admit(Deadline.after(60), is_later_step=is_later_step):
            order.append(is_later_step)

    waiting = [asyncio.create_task(wait(is_later_step=is_later_step)) for is_later_step in (False, True)]
    await asyncio.sleep(0)
    leave(permit)
    await asyncio.gather(*waiting)
    assert order == [True, False]
