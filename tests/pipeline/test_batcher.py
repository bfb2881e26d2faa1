"""When images are sent, in which batches, and with which results."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline import batch as batch_module
from app.pipeline import batcher as batcher_module
from app.pipeline.batch import Batch, Call, PendingImage, next_batch
from app.pipeline.batcher import Batcher
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, NORMAL, Caller
from app.resilience.lease import Lease
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall, ModelOnServer
from app.triton.shared_memory import Arena
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG

SPEC = from_triton_config({**CONFIG, "max_batch_size": 4}, "1")


def pending(arena: Arena | None = None, nbytes: int = 10, *, spec: ModelSpec = SPEC, caller: Caller = ANYBODY) -> PendingImage:
    """Make a waiting image in the next slot of an arena, or inline."""
    slot = None if arena is None else arena.take(nbytes)
    buffer: Any = SimpleNamespace(slot=slot, tensor=np.zeros(nbytes, np.uint8))
    permit: Any = None
    return PendingImage(spec, buffer, CallContext(Deadline.after(30), Timing(), "", caller), permit)


@pytest.mark.parametrize(
    ("waiting", "most", "is_mapped", "chosen"),
    [
        ("bca", 8, True, "abc"),  # in the order in memory
        ("abde", 8, True, "ab"),  # a slot that is not ready ends a batch
        ("deabc", 4, True, "bcde"),  # those behind come first
        ("xayb", 8, True, "xy"),  # messages and slots do not mix
        ("pab", 8, True, "p"),  # in another arena
        ("xLy", 8, True, "x"),  # as many bytes as do not stop the worker
        ("xsvy", 8, True, "xy"),  # a batch with one has failed, and one is of another version
        ("axdb", 8, False, "ax"),  # slots make no difference to a Triton that maps no memory
    ],
)
async def test_batch_has_what_lies_beside_its_first_image(
    monkeypatch: pytest.MonkeyPatch, waiting: str, most: int, chosen: str, *, is_mapped: bool
) -> None:
    monkeypatch.setattr(batch_module, "_MAX_INLINE_BYTES", 25)
    arena, other = Arena(100), Arena(100)
    images = {name: pending(arena) for name in "abcde"}
    images |= {name: pending() for name in "xy"} | {"p": pending(other), "L": pending(nbytes=100), "s": pending()}
    images["v"] = pending(spec=from_triton_config({**CONFIG, "max_batch_size": 4}, "2"))
    images["s"].goes_alone = True
    batch = next_batch([images[name] for name in waiting], most, lambda _: is_mapped)
    arena.close()
    other.close()

    assert [*batch.images] == [images[name] for name in chosen]
    assert batch.slot == (images[chosen[0]].buffer.slot if is_mapped or len(chosen) == 1 else None)


@pytest.mark.parametrize(
    ("levels", "backend", "priority", "expected"),
    [
        (0, "", HIGH, (0, 0)),  # a model without levels knows no priority
        (0, "ensemble", NORMAL, (0, 1)),  # its steps may have some
        (3, "", HIGH, (1, 1)),
        (3, "", NORMAL, (0, 1)),
        (3, "", LOW, (3, 3)),
    ],
)
async def test_tritons_queue_has_the_priority_of_the_caller(
    levels: int, backend: str, priority: int, expected: tuple[int, int]
) -> None:
    """0 is the default of the model's config. Of a normal caller, an urgent call has the highest one."""
    spec = msgspec.structs.replace(SPEC, priority_levels=levels, backend=backend)
    image = pending(spec=spec, caller=Caller("", priority=priority))

    assert tuple(Batch([image], None, is_urgent=is_urgent).priority for is_urgent in (False, True)) == expected


class Calls:
    """Answers each image with the number in its tensor, once `may_answer` is set; tests set the attributes."""

    def __init__(self, max_calls: float) -> None:
        self.max_calls = max_calls
        server: Any = SimpleNamespace(specs=SimpleNamespace(known=lambda spec: spec), regions=set())
        self.served = ModelOnServer(server)
        self.batches: list[list[int]] = []
        """The numbers of the images of each call, in order."""
        self.are_urgent: list[bool] = []
        """Whether Triton should run each call before others."""
        self.most_calls = 0
        self.may_answer = asyncio.Event()
        self.poison: dict[int, GatewayError] = {}
        """Errors by the number of the image that causes them; they fail the whole batch."""
        self.missing_rows = 0
        """Number of rows missing in the answer to a batch."""

    def find(self, _: ModelSpec, more_calls: int = 0) -> ModelOnServer | None:
        return self.served if self.served.calls < self.max_calls + more_calls else None

    async def infer(self, batch: Batch, call: InFlightCall) -> list[InferResult]:
        numbers = [int(image.buffer.tensor[0]) for image in batch.images]
        self.batches.append(numbers)
        self.are_urgent.append(batch.is_urgent)
        await self.may_answer.wait()
        self.served.note_answer(len(numbers), call.began_at)
        for number in numbers:
            if number in self.poison:
                raise self.poison[number]
        rows = numbers[self.missing_rows :] if len(numbers) > 1 else numbers
        return InferResult({"output0": np.array(rows, np.float32)[:, None]}, "1").split(batch.spec, len(numbers))

    def abandon(self, image: PendingImage, call: Call | None) -> None: ...


class Setup:
    def __init__(self) -> None:
        self.calls = Calls(1)
        calls: Any = self.calls
        self.batcher = Batcher(calls)
        self.asking: list[asyncio.Task[float]] = []
        self.timings: list[Timing] = []
        self._numbers = count()

    async def start(  # noqa: PLR0913 - what a request has
        self,
        images: int = 1,
        caller: str = "",
        *,
        version: int | None = None,
        seconds: float = 30,
        priority: int = NORMAL,
        is_batch: bool = False,
    ) -> Sequence[asyncio.Task[float]]:
        """Start requests; their results are the numbers of their images, from 0."""
        call = CallContext(Deadline.after(seconds), Timing(), "", Caller(caller, priority=priority), is_batch=is_batch).pinned_to(
            version
        )
        started = [asyncio.ensure_future(self._infer(next(self._numbers), call)) for _ in range(images)]
        self.asking += started
        await turns()
        return started

    async def _infer(self, number: int, call: CallContext) -> float:
        call = call._replace(timing=Timing(), request_id=f"id{number}")
        self.timings.append(call.timing)
        buffer: Any = SimpleNamespace(slot=None, tensor=np.array([number], np.uint8))
        with Lease() as permit:
            as_permit: Any = permit
            result = await self.batcher.run(PendingImage(SPEC, buffer, call, as_permit))
            return float(result.outputs["output0"][0, 0])

    async def finish(self) -> list[Any]:
        """Let all be answered; return the results."""
        self.calls.may_answer.set()
        return await asyncio.gather(*self.asking, return_exceptions=True)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.finish()
    await turns()
    assert len(made.batcher.waiting) == made.batcher.calls == 0
    assert not made.batcher.tasks


async def test_images_that_become_ready_during_a_call_leave_together(setup: Setup) -> None:
    await setup.start(8)
    assert setup.calls.batches == [[0]]
    assert len(setup.batcher.waiting) == 7

    assert await setup.finish() == list(range(8))
    assert setup.calls.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]
    assert ['batch;desc="4";dur=' in timing.server_timing() for timing in setup.timings] == [0 < number < 5 for number in range(8)]


@pytest.mark.parametrize(
    ("error", "version", "retried", "failed"),
    [
        (InferenceFailed("no"), None, [[1], [2], [3]], [2]),
        (ModelNotReady("not loaded"), 1, [[1], [2], [3]], [2]),  # a version that has gone
        (ModelNotReady("not loaded"), None, [], [1, 2, 3]),
        (TritonUnavailable("gone"), None, [], [1, 2, 3]),  # retries would only add load
        (None, None, [[1], [2], [3]], []),  # too few rows are nobody's
    ],
)
async def test_images_of_a_failed_batch_are_tried_alone_if_one_may_be_the_cause(
    setup: Setup, error: GatewayError | None, version: int | None, retried: list[list[int]], failed: list[int]
) -> None:
    if error is None:
        setup.calls.missing_rows = 1
    else:
        setup.calls.poison[2] = error
    await setup.start(2)
    await setup.start(version=version)
    await setup.start()
    results = await setup.finish()

    assert setup.calls.batches == [[0], [1, 2, 3], *retried]
    assert [number for number, result in enumerate(results) if isinstance(result, Exception)] == failed
    assert len({id(results[number]) for number in failed}) == len(failed)  # copies: a traceback connects no requests


async def test_poison_after_poison_ends_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches end when no retries are left, so that no image ever fails because of another."""
    monkeypatch.setattr(batcher_module, "_MAX_ISOLATED", 6)
    setup = Setup()
    setup.calls.poison = {number: InferenceFailed("no") for number in range(0, 40, 2)}
    await setup.start(40)
    results = await setup.finish()

    assert [result for result in results if not isinstance(result, InferenceFailed)] == list(range(1, 40, 2))
    assert len(setup.calls.batches) <= 40 + 6
    assert all(len(batch) == 1 for batch in setup.calls.batches[-20:])


async def test_callers_take_turns(setup: Setup) -> None:
    for images, caller, is_batch in ((1, "a", False), (8, "a", True), (5, "a", False), (3, "b", False)):
        await setup.start(images, caller, is_batch=is_batch)
    await setup.finish()

    batches, singles, others = set(range(1, 9)), set(range(9, 14)), {14, 15, 16}
    sent = [number for batch in setup.calls.batches[1:] for number in batch]
    assert len(others & set(sent[:7])) == len(singles & set(sent[:7])) == 3
    assert len(batches & set(sent[:9])) == 1
    assert sent[9:] == [*range(2, 9)]


async def test_caller_with_no_image_under_way_has_one_extra_call(setup: Setup) -> None:
    setup.calls.max_calls = 2
    for images, caller in ((6, "a"), (3, "b"), (1, "c"), (1, "a")):
        await setup.start(images, caller)

    assert setup.calls.batches == [[0], [1], [6]]
    assert setup.calls.are_urgent == [False, False, True]
    assert await setup.finish() == list(range(11))


async def test_only_images_of_its_own_and_lower_priorities_make_a_call_urgent(setup: Setup) -> None:
    """A caller has no right to a part of the calls that those with a higher priority use."""
    setup.calls.max_calls = 2
    for caller, priority in (("h", HIGH), ("h", HIGH), ("n", NORMAL), ("l", LOW), ("i", HIGH)):
        await setup.start(1, caller, priority=priority)

    assert setup.calls.batches == [[0], [1], [4]]
    assert setup.calls.are_urgent == [False, False, True]


async def test_image_that_can_only_be_late_is_not_sent(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent calls took longer than it has left, and another one is under way. A single measurement decides nothing."""
    clock = Clock(monkeypatch, "app.triton.model_on_server", "app.resilience.deadline")
    setup.calls.served.forget_speed()  # measured from now
    setup.calls.max_calls = 3
    await setup.start(1)
    await setup.start(1)
    clock.now += 5
    assert await setup.finish() == [0, 1]
    setup.calls.may_answer.clear()
    await setup.start(1)
    (late,) = await setup.start(1, seconds=4)
    assert isinstance(late.exception(), DeadlinePassed)
    await setup.start(1, seconds=6)
    assert (await setup.finish())[4:] == [4]

    assert await (await setup.start(1, seconds=0.1))[0] == 5  # alone
