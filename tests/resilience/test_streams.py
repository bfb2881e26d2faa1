"""Frames of cameras that send four times what a model can take, beside single requests of the same callers."""

import asyncio
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from app.errors import Superseded
from app.resilience.concurrency import BatchTimes
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue
from app.resilience.streams import StreamQueue
from tests.machines import Machine, check

CAMERAS, INTERVAL, CALL, STEP = 16, 0.2, 0.05, 0.005
SECONDS = 8


class Cameras(Machine):
    """Two workers, to which frames go by chance or by camera, and a model that takes one image at a time."""

    TIMED = tuple(f"app.resilience.{name}" for name in ("streams", "model_queue", "rounds", "concurrency", "deadline"))

    def __init__(self) -> None:
        super().__init__()
        tables = self.open_tables(2)
        self.queues = [ModelQueue(table, "tiny", 128, target_seconds=2.5) for table in tables]
        self.frames = [StreamQueue(queue, table, "tiny") for queue, table in zip(self.queues, tables, strict=True)]
        self.free_at = 0.0
        """When the model has ended what it was sent."""
        self.took: dict[str, list[float]] = {}
        """Seconds of each answer, by stream; those of single requests have none."""

    async def ask(self, worker: int, caller: Caller, stream: str = "") -> None:
        began, deadline = self.clock.now, Deadline.after(60)
        try:
            frames, queue = self.frames[worker], self.queues[worker]
            permit = await (frames.admit(caller, stream, 0.0, deadline) if stream else queue.admit(caller, deadline))
        except Superseded:
            return
        with permit:
            began_at = self.clock.now
            self.free_at = max(self.free_at, began_at) + CALL
            await asyncio.sleep(self.free_at - began_at)
            permit.measure(BatchTimes(0.0, self.clock.now - began_at))
        self.took[stream].append(self.clock.now - began)

    @rule(seed=st.integers(0, 99), callers=st.sampled_from([1, 2, CAMERAS]), is_by_camera=st.booleans())
    def film(self, seed: int, callers: int, is_by_camera: bool) -> None:  # noqa: FBT001 - hypothesis names it
        chance = random.Random(seed)  # noqa: S311 - reproducible
        end = self.clock.now + SECONDS
        due = {"": self.clock.now} | {f"camera {number}": self.clock.now + chance.uniform(0, INTERVAL) for number in range(CAMERAS)}
        self.took = {stream: [] for stream in due}
        tasks: list[asyncio.Task[None]] = []
        while self.clock.now < end:
            for number, stream in enumerate(due):
                if due[stream] <= self.clock.now:
                    due[stream] += INTERVAL if stream else 1.0
                    worker = number % 2 if is_by_camera else chance.randrange(2)
                    tasks.append(self.start(self.ask(worker, Caller(f"caller {number % callers}"), stream)))
            self.skip(STEP)
        single, *cameras = (list(took) for took in self.took.values())
        while not all(task.done() for task in tasks):  # the last frames, for which no newer ones come
            self.skip(STEP)
        self.run(asyncio.gather(*tasks))

        numbers = [len(ages) for ages in cameras]
        assert max(numbers) - min(numbers) <= 2
        assert sum(numbers) + len(single) >= SECONDS / CALL - 2  # the model was never idle
        # A single request of another caller may come between.
        assert max(map(max, cameras)) <= INTERVAL + (2 + (callers > 1)) * CALL + 2 * STEP
        assert max(single) <= CALL + 2 * CALL + 2 * STEP

    def finish(self) -> None:
        assert not any(map(len, self.frames))
        assert not any(queue.in_progress for queue in self.queues)


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.system)])
def test_cameras_get_equal_numbers_of_fresh_answers(runs: int) -> None:
    check(Cameras, runs=runs, steps=1)
