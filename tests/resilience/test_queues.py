"""Requests for one model at two workers: who is admitted, who waits, and who is rejected."""

import asyncio
import random
from asyncio import Task
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from app.errors import CircuitOpen, GatewayFull, Superseded
from app.resilience import model_queue
from app.resilience.batch_queue import BatchQueue
from app.resilience.concurrency import BatchTimes
from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.streams import StreamQueue
from tests.machines import Machine, check
from tests.support import OpenTable

MAX_WAIT = 2**-4
PACE = 2**-8
"""Seconds between the ends of requests."""
CALLERS = {"a": Caller("a", 0.5), "b": Caller("b", 0.5), "small": Caller("small", 0.1, has_share=True)}
ROOM = {"": 3, "small": 1}
"""Requests in progress by pool, with a limit of 6; another caller of the pool may have one more."""
IMAGES = 1
"""Images of batches in progress, the same."""


class Line(NamedTuple):
    """Requests of one caller in one worker: single ones, or images of batches."""

    worker: int
    key: str
    is_image: bool = False


class Waiting(NamedTuple):
    line: Line
    task: Task[Permit]
    until: float


LINES = st.sampled_from([Line(worker, key) for worker in range(2) for key in ("a", "a", "b", "small")])


def fits(line: Line, held: Sequence[Line], room: int) -> bool:
    """Return whether one more may be in progress: a caller may use nine times what is left, and each may use one."""
    own = sum(other.key == line.key for other in held) + 1
    total = sum(CALLERS[other.key].pool == CALLERS[line.key].pool for other in held) + 1
    return own <= 9 * (room - total) + room or (own == 1 and total <= room + 1)


class Queues(Machine):
    """Requests of all workers count together. Each worker has two lines for each caller: single ones, and images of batches."""

    TIMED = ("app.resilience.model_queue", "app.resilience.concurrency", "app.resilience.deadline")

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(model_queue, "_MAX_WAIT_SECONDS", MAX_WAIT)
        self.queues = [ModelQueue(table, "tiny", 6, target_seconds=1e6) for table in self.open_tables(2)]
        self.batches: dict[Line, BatchQueue] = {}
        for worker, queue in enumerate(self.queues):
            queue.measure(PACE, 1, is_near=False)
            for key in ("a", "b"):
                queue.check(CALLERS[key], 0)
                self.batches[Line(worker, key, is_image=True)] = BatchQueue(queue, CALLERS[key])
        self.held: list[tuple[Line, Permit]] = []
        self.waiting: list[Waiting] = []
        """In order of arrival."""
        self.progress = [0.0, 0.0]
        """When a request of each worker ended last, or the first one began."""

    def has_room(self, line: Line) -> bool:
        """Return whether the next request of a line has room; single ones go before images."""
        held = [other for other, _ in self.held]
        if not fits(line, held, ROOM[CALLERS[line.key].pool]):
            return False
        images = [other for other in held if other.is_image]
        return not line.is_image or (fits(line, images, IMAGES) and not self.length(Line(line.worker, line.key)))

    def length(self, line: Line) -> int:
        return sum(request.line == line for request in self.waiting)

    def is_busy(self, worker: int) -> bool:
        return any(line.worker == worker for line, _ in self.held)

    def pace(self, worker: int) -> float:
        """Return the pace: while requests are in progress, a pause of more than 0.1 seconds makes it slower."""
        return PACE * max(1.0, (self.clock.now - self.progress[worker]) / 0.1 if self.is_busy(worker) else 0.0)

    def is_soon(self, line: Line, uploads: int = 0) -> bool:
        ahead = uploads + sum(other.worker == line.worker and not other.is_image for other, *_ in self.waiting) + 1
        return ahead * self.pace(line.worker) * 2 / CALLERS[line.key].fraction <= MAX_WAIT

    def until_served(self, line: Line) -> int:
        """Return how many requests end until all of a caller have, if callers are served in turn."""
        held = [other for other, _ in self.held if CALLERS[other.key].pool == CALLERS[line.key].pool]
        own = sum(other.key == line.key for other in held)
        active = len({other.key for other in held if other.worker == line.worker})
        return len(held) if own == len(held) else min(len(held), own * max(2, active))

    def arrive(self, line: Line, seconds: float) -> Waiting:
        deadline = Deadline.after(seconds)
        if line.is_image:
            task = self.loop.create_task(self.batches[line].admit(deadline))
        else:
            task = self.loop.create_task(self.queues[line.worker].admit(CALLERS[line.key], deadline))
        self.waiting.append(Waiting(line, task, self.clock.now + (seconds if line.is_image else MAX_WAIT)))
        return self.waiting[-1]

    def settle(self, seconds: float = 0.0) -> None:
        """Let things happen, and see who was admitted, in order of arrival, or is too late."""
        self.skip(seconds)
        for request in [request for request in self.waiting if request.task.done()]:
            before = self.waiting[: self.waiting.index(request)]
            self.waiting.remove(request)
            if request.task.cancelled():
                continue
            if request.task.exception() is None:
                assert not [other for other in before if other.line == request.line and not other.task.done()]
                if not self.is_busy(request.line.worker):
                    self.progress[request.line.worker] = self.clock.now
                self.held.append((request.line, request.task.result()))
            else:
                assert type(request.task.exception()) is (TurnMissed if request.line.is_image else GatewayFull)
                assert self.clock.now >= request.until

    @rule(lines=st.lists(st.sampled_from([Line(0, "a"), Line(1, "a"), Line(0, "b")]), min_size=3, max_size=6))
    def ask_together(self, lines: list[Line]) -> None:
        for line in lines:
            self.ask(line, 60.0, 0)

    @rule(line=LINES, seconds=st.sampled_from([60.0, 60.0, 2**-7, 2**-9]), uploads=st.sampled_from([0, 0, 1, 10]))
    def ask(self, line: Line, seconds: float, uploads: int) -> None:
        """A request is checked before its body is received. It is rejected if its turn or its result would come too late."""
        enters = not self.length(line) and self.has_room(line)
        try:
            self.queues[line.worker].check(CALLERS[line.key], uploads)
            assert enters or self.is_soon(line, uploads)
        except GatewayFull:
            assert not enters
            assert not self.is_soon(line, uploads)
        ahead = self.until_served(line)
        is_late = ahead > 0 and (ahead + 1) * self.pace(line.worker) > 0.7 * seconds
        waits = not enters and self.is_soon(line)
        request = self.arrive(line, seconds)
        self.skip(0)
        assert request.task.done() == (is_late or not waits)
        if is_late or not (enters or waits):
            self.waiting.remove(request)
            assert isinstance(request.task.exception(), GatewayFull)
        else:
            self.settle()
            assert (request in self.waiting) == waits

    @rule(worker=st.integers(0, 1), key=st.sampled_from("aab"), seconds=st.sampled_from([60.0, 2**-5]), images=st.integers(1, 4))
    def ask_batch(self, worker: int, key: str, seconds: float, images: int) -> None:
        line = Line(worker, key, is_image=True)
        for _ in range(images):
            waits = bool(self.length(line)) or not self.has_room(line)
            request = self.arrive(line, seconds)
            self.settle()
            assert (request in self.waiting) == waits

    @precondition(lambda self: self.held)
    @rule(data=st.data(), then=st.sampled_from(["", "", "cancel", "cancel first", "arrive"]))
    def leave(self, data: st.DataObject, then: str) -> None:
        """The request whose turn comes may be cancelled before or after that, or others arrive."""
        line, permit = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        request = next((request for request in self.waiting if request.line == line), None)

        def end() -> None:
            if then == "cancel first" and request is not None:
                request.task.cancel()
            permit.release()
            if then == "cancel" and request is not None:
                request.task.cancel()

        self.call(end)
        self.progress[line.worker] = self.clock.now
        self.settle()
        assert line.is_image or not self.length(line) or not self.has_room(line)
        if then == "arrive":
            for worker in (1 - line.worker, line.worker):
                self.ask_batch(worker, "a", 60.0, 1)
                self.ask(Line(worker, line.key), 60.0, 0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting)).task.cancel()
        self.settle()

    @rule(steps=st.sampled_from([1, 1, 4, 8, 40]))
    def let_pass(self, steps: int) -> None:
        """Within 5 ms, a worker sees that a request of another one has ended."""
        for _ in range(steps):
            self.settle(2 * PACE)
        assert not [request for request in self.waiting if self.has_room(request.line)]

    @invariant()
    def counts_are_right(self) -> None:
        for worker, queue in enumerate(self.queues):
            assert queue.in_progress == len(self.held)
            assert queue.own == sum(line.worker == worker for line, _ in self.held)
            assert queue.waiting == sum(line.worker == worker and not line.is_image for line, *_ in self.waiting)
        for line, batch in self.batches.items():
            assert batch.waiting == self.length(line)
        for pool, room in ROOM.items():
            assert sum(CALLERS[line.key].pool == pool for line, _ in self.held) <= room + (not pool)
        assert sum(line.is_image for line, _ in self.held) <= IMAGES + 1
        for line, permit in self.held:
            assert permit.is_last == (not self.has_room(Line(line.worker, line.key)))

    def finish(self) -> None:
        """Everybody's turn comes, and every place is given back."""
        while self.held or self.waiting:
            for line, permit in self.held:
                self.progress[line.worker] = self.clock.now
                self.call(permit.release)
            self.held.clear()
            self.settle(2 * PACE)
        assert not any(queue.in_progress or queue.own for queue in self.queues)


@pytest.mark.parametrize("runs", [13, pytest.param(40, marks=pytest.mark.system)])
def test_queues_of_two_workers(runs: int) -> None:
    check(Queues, runs=runs, steps=40)


CAMERAS, INTERVAL, CALL, STEP, SECONDS = 16, 0.2, 0.05, 0.005, 20


class Cameras(Machine):
    """Two workers get four times as many frames as a model can take, one at a time, and single requests of the first caller."""

    TIMED = tuple(f"app.resilience.{name}" for name in ("streams", "model_queue", "rounds", "concurrency", "deadline"))
    free_at = 0.0

    async def ask(self, queue: StreamQueue, caller: Caller, stream: str) -> None:
        began, deadline = self.clock.now, Deadline.after(60)
        try:
            permit = await (queue.admit_frame(caller, stream, began, deadline, 1) if stream else queue.admit(caller, deadline))
        except Superseded:
            return
        with permit:
            self.free_at = max(self.free_at, began_at := self.clock.now) + CALL
            await asyncio.sleep(self.free_at - began_at)
            permit.measure(BatchTimes(0.0, self.clock.now - began_at))
        self.took[stream].append(self.clock.now - began)

    @rule(seed=st.integers(0, 99), callers=st.sampled_from([1, 2, CAMERAS]), is_by_camera=st.booleans())
    def film(self, seed: int, callers: int, is_by_camera: bool) -> None:  # noqa: FBT001 - hypothesis names it
        *lines, hung = [StreamQueue(table, "tiny", 128, 2.5, lambda: False) for table in self.open_tables(3)]
        other, deadline = asyncio.new_event_loop(), Deadline.after(60)
        frames = [other.create_task(hung.admit_frame(Caller("caller 0"), str(n), self.clock.now, deadline, 1)) for n in range(3)]
        other.run_until_complete(asyncio.wait(frames, return_when=asyncio.FIRST_COMPLETED))  # two are in progress, one is next
        self.skip(1.01)
        chance, start = random.Random(seed), self.clock.now  # noqa: S311 - reproducible
        due = {"": start} | {f"camera {number}": start + chance.uniform(0, INTERVAL) for number in range(CAMERAS)}
        self.took: dict[str, list[float]] = {stream: [] for stream in due}
        tasks: list[Task[None]] = []
        while self.clock.now < start + SECONDS:
            for number, (stream, at) in enumerate(due.items()):
                if at <= self.clock.now:
                    due[stream] += INTERVAL if stream else 1.0
                    line = lines[number % 2 if is_by_camera else chance.randrange(2)]
                    tasks.append(self.start(self.ask(line, Caller(f"caller {number % callers}"), stream)))
            self.skip(STEP)
        single, *cameras = (list(took) for took in self.took.values())
        while not all(task.done() for task in tasks):  # no newer frames come
            self.skip(STEP)

        assert not any(queue.own or queue.frames for queue in lines)
        for frame in frames:
            frame.result().release() if frame.done() else frame.cancel()
        other.run_until_complete(asyncio.wait(frames))
        other.close()
        numbers = [*map(len, cameras)]
        assert max(numbers) <= 1.1 * min(numbers) + 1
        assert sum(numbers) + len(single) >= SECONDS / CALL - 2  # the model was never idle
        # A single request of another caller may come between.
        assert max(map(max, cameras)) <= INTERVAL + (2 + (callers > 1)) * CALL + 2 * STEP
        assert max(single) <= CALL + 2 * CALL + 2 * STEP


def test_cameras_get_equal_numbers_of_fresh_answers() -> None:
    check(Cameras, runs=3, steps=1)


async def test_waiting_frames_are_bounded_and_leave_room_for_other_callers(open_table: OpenTable) -> None:
    """Those of a caller whose single requests use the whole limit hold back no other one."""
    silent = list[bool]()
    lines = [StreamQueue(open_table(), "tiny", 128, 2.5, lambda: bool(silent)) for _ in range(2)]
    many, other, deadline = Caller("many"), Caller("other"), Deadline.after(60)
    held = [await lines[0].admit(many, deadline) for _ in range(int(lines[0].limit))]
    waiting = [asyncio.create_task(lines[0].admit_frame(many, f"{number}", 0.0, deadline, 1)) for number in range(200)]
    newer = asyncio.create_task(lines[1].admit_frame(many, "0", 1.0, deadline, 1))
    with pytest.raises(Superseded):
        await waiting[0]
    assert {type(task.exception()) for task in waiting[1:] if task.done()} == {GatewayFull}
    assert len(lines[0].frames) == 127
    held.append(await lines[1].admit_frame(other, "door", 0.0, deadline, 1))
    with pytest.raises(TurnMissed):
        await lines[1].admit_frame(many, "yard", 0.0, Deadline.after(0), 1)
    held.append(await lines[1].admit_frame(other, "yard", 0.0, deadline, 1))
    silent.append(True)
    with pytest.raises(CircuitOpen):
        await lines[1].admit_frame(other, "gate", 0.0, deadline, 1)
    for task in (newer, *waiting):
        task.cancel()
    await asyncio.gather(newer, *waiting, return_exceptions=True)
    for permit in held:
        permit.release()
