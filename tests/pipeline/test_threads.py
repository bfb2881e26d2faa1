"""Decoding and drawing run in a few threads, under the deadline of their request; what is dropped frees its memory."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from app.errors import DeadlinePassed
from app.pipeline import draw as draw_module
from app.pipeline.call import CallContext
from app.pipeline.decode_threads import DecodeThreads
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import SHADOW, Caller, Turn
from app.resilience.lease import Lease
from app.telemetry.timing import DRAW, Timing
from tests.fakes.triton import SPEC
from tests.imaging.samples import encode
from tests.pipeline.gate import Gate
from tests.processes import PATIENCE_SECONDS
from tests.support import eventually
from tests.world import World

A, B = Caller("a"), Caller("b")
LARGE = 1e6
"""Pixels of an image that is decoded in another thread."""


class Job:
    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_started.set()
        self.may_end.wait(PATIENCE_SECONDS)
        return "done"


@pytest.fixture
def pool() -> Iterator[DecodeThreads]:
    made = DecodeThreads(1)
    yield made
    made.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.may_end.set()


def start(pool: DecodeThreads, work: Callable[[], Any], turn: Turn = Turn(A)) -> asyncio.Future[Any]:  # noqa: B008 - a constant
    return asyncio.ensure_future(pool.run(work, Deadline.after(30), turn=turn))


class Image: ...


@pytest.mark.parametrize("is_late", [False, True])
async def test_queued_job_that_is_dropped_frees_what_it_refers_to(pool: DecodeThreads, job: Job, *, is_late: bool) -> None:
    """The image of a request that has left or missed its deadline does not stay in memory until a thread is free."""
    deadline: Any = SimpleNamespace(remaining=0.001 if is_late else 30)
    blocking = start(pool, job)
    await eventually(job.has_started.is_set)
    image = Image()
    left = weakref.ref(image)
    asking = asyncio.ensure_future(pool.run(partial(id, image), deadline, Lease(), turn=Turn(A)))
    await asyncio.sleep(0)
    del image
    assert (left() is not None, pool.waiting) == (True, 1)
    if not is_late:
        asking.cancel()
    with pytest.raises(DeadlinePassed if is_late else asyncio.CancelledError):
        await asking
    del asking
    assert (left(), pool.waiting) == (None, 0)
    job.may_end.set()

    assert await blocking == "done"


async def test_large_images_and_shadows_have_threads_of_their_own(pool: DecodeThreads, job: Job) -> None:
    """Those of large images have a lower priority."""
    shadow = Turn(Caller("shadow", priority=SHADOW))
    blocked = [start(pool, job, shadow._replace(cost=cost)) for cost in (0, 1e7)]
    await eventually(job.has_started.is_set)
    read_niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
    usual = await start(pool, read_niceness, Turn(B))
    assert await start(pool, read_niceness, Turn(B, LARGE)) == min(usual + 6, 19)
    large = Job()
    blocked.append(start(pool, large, Turn(A, LARGE)))
    await eventually(large.has_started.is_set)

    assert await start(pool, lambda: "small") == "small"
    assert (pool.waiting, [task.done() for task in blocked]) == (1, [False] * 3)
    for each in (job, large):
        each.may_end.set()
    assert await asyncio.gather(*blocked) == ["done"] * 3


@pytest.mark.parametrize("is_late", [False, True])
async def test_memory_and_backlog_count_until_a_picture_is_drawn(
    world: World, monkeypatch: pytest.MonkeyPatch, gate: Gate, *, is_late: bool
) -> None:
    """Also after its request has left or missed its deadline."""
    data = encode(PIL.Image.new("RGB", (2000, 1000)), "PNG")
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), 2000, 1000, SPEC, "1")
    threads = gate.block(monkeypatch, draw_module, "draw_picture")
    context = CallContext(Deadline.after(3 if is_late else 30), Timing(), "abc")  # it begins before 3 s
    task = asyncio.create_task(draw_module.draw(world.pipeline, data, found, "image/png", context))
    await eventually(gate.reached.is_set)
    admission = world.admission
    nbytes = 2 * len(data) + 2_000_000 * (7 + 6)  # a copy of the file, decoded by Pillow, and the picture
    assert threads[0].startswith("decode")
    assert (admission.decode_backlog.pixels, admission.memory.own_bytes) == (8 * 2_000_000, nbytes)
    if not is_late:
        task.cancel()
    with pytest.raises(DeadlinePassed if is_late else asyncio.CancelledError):
        await task
    assert context.timing.fail() == DRAW
    assert admission.memory.own_bytes == nbytes
    gate.opened.set()

    await eventually(lambda: admission.memory.own_bytes == admission.decode_backlog.pixels == 0)
