"""When images are sent, in which batches, and with which results."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline import batcher as batcher_module
from app.pipeline.batch import Batch, Call, PendingImage
from app.pipeline.batcher import Batcher
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import HIGH, LOW, NORMAL, Caller
from app.resilience.lease import Lease
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall, ModelOnServer
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG

SPEC = from_triton_config({**CONFIG, "max_batch_size": 4}, "1")


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
        self.under_way: list[int] = []
        """Number of calls under way when each began, with it."""
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
        self.under_way.append(self.served.calls)
        await self.may_answer.wait()
        self.served.note_answer(len(numbers), call.began_at)
        for number in numbers:
            if number in self.poison:
                raise self.poison[number]
        rows = numbers[self.missing_rows :] if len(numbers) > 1 else numbers
        return InferResult({"output0": np.array(rows, np.float32)[:, None]}, "1").split(batch.spec, len(numbers))

    def abandon(self, image: PendingImage, call: Call | None) -> None: ...

    async def close(self) -> None: ...


class Setup:
    def __init__(self, max_calls: float = 1) -> None:
        self.calls = Calls(max_calls)
        self.batcher = self.make_batcher()
        self.timings: list[Timing] = []
        self._numbers = count()

    def make_batcher(self) -> Batcher:
        calls: Any = self.calls
        return Batcher(calls)

    def start(  # noqa: PLR0913 - what a request has
        self,
        images: int = 1,
        caller: str = "",
        *,
        version: int | None = None,
        is_batch: bool = False,
        seconds: float = 30,
        priority: int = NORMAL,
    ) -> list[asyncio.Task[float]]:
        """Start requests; their results are the numbers of their images, from 0."""
        deadline = Deadline.after(seconds)
        call = CallContext(deadline, Timing(), "", Caller(caller, priority=priority), is_batch=is_batch).pinned_to(version)
        return [asyncio.ensure_future(self._infer(next(self._numbers), call)) for _ in range(images)]

    async def _infer(self, number: int, call: CallContext) -> float:
        call = call._replace(timing=Timing(), request_id=f"id{number}")
        self.timings.append(call.timing)
        buffer: Any = SimpleNamespace(slot=None, tensor=np.array([number], np.uint8))
        with Lease() as permit:
            as_permit: Any = permit
            result = await self.batcher.run(PendingImage(SPEC, buffer, call, as_permit))
            return float(result.outputs["output0"][0, 0])


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    made.calls.may_answer.set()
    await turns()
    assert len(made.batcher.waiting) == made.batcher.calls == 0
    assert not made.batcher.tasks


async def test_images_that_become_ready_during_a_call_leave_together(setup: Setup) -> None:
    asking = setup.start(8)
    await turns()
    assert setup.calls.batches == [[0]]
    assert len(setup.batcher.waiting) == 7
    setup.calls.may_answer.set()

    assert await asyncio.gather(*asking) == list(range(8))
    assert setup.calls.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]


async def test_a_caller_learns_how_many_went_together(setup: Setup) -> None:
    asking = setup.start(4)
    await turns()
    setup.calls.may_answer.set()
    await asyncio.gather(*asking)

    assert 'batch;desc="1";dur=' in setup.timings[0].server_timing()
    assert all('batch;desc="3";dur=' in timing.server_timing() for timing in setup.timings[1:])


async def test_a_version_that_has_gone_fails_alone(setup: Setup) -> None:
    setup.calls.poison = {2: ModelNotReady("not loaded")}
    asking = [*setup.start(2), *setup.start(version=1), *setup.start()]
    setup.calls.may_answer.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)

    assert [isinstance(answer, ModelNotReady) for answer in answers] == [False, False, True, False]
    assert setup.calls.batches == [[0], [1, 2, 3], [1], [2], [3]]


async def test_a_model_that_has_gone_fails_at_once(setup: Setup) -> None:
    setup.calls.poison = {2: ModelNotReady("not loaded")}
    asking = setup.start(4)
    setup.calls.may_answer.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)

    assert [isinstance(answer, ModelNotReady) for answer in answers] == [False, True, True, True]
    assert setup.calls.batches == [[0], [1, 2, 3]]


async def test_an_answer_with_too_few_rows_is_nobodys(setup: Setup) -> None:
    setup.calls.missing_rows = 1
    asking = setup.start(4)
    await turns()
    setup.calls.may_answer.set()

    assert await asyncio.gather(*asking) == [0, 1, 2, 3]
    assert setup.calls.batches == [[0], [1, 2, 3], [1], [2], [3]]


async def test_failure_of_triton_fails_each_image_of_the_call(setup: Setup) -> None:
    """Retries of single images would only add load; each request gets its own copy of the error."""
    setup.calls.poison[1] = TritonUnavailable("gone")
    asking = setup.start(4)
    await turns()
    setup.calls.may_answer.set()
    results = await asyncio.gather(*asking, return_exceptions=True)

    assert [type(result) for result in results[1:]] == [TritonUnavailable] * 3
    assert len({id(result) for result in results[1:]}) == 3
    assert setup.calls.batches == [[0], [1, 2, 3]]


async def test_image_of_a_caller_who_has_left_is_not_retried(setup: Setup) -> None:
    setup.calls.poison[2] = InferenceFailed("no")
    asking = setup.start(4)
    await turns()
    setup.calls.max_calls = 2
    asking += setup.start()
    await turns()
    assert setup.calls.batches == [[0], [1, 2, 3, 4]]
    asking[3].cancel()
    await turns()
    setup.calls.may_answer.set()
    await asyncio.gather(*asking, return_exceptions=True)

    assert setup.calls.batches[2:] == [[1], [2], [4]]


async def test_poison_after_poison_ends_the_batches(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches end when no retries are left, so that no image ever fails because of another."""
    monkeypatch.setattr(batcher_module, "_MAX_ISOLATED", 6)
    setup.batcher = setup.make_batcher()
    setup.calls.poison = {number: InferenceFailed("no") for number in range(0, 40, 2)}
    asking = setup.start(40)
    await turns()
    setup.calls.may_answer.set()
    results = await asyncio.gather(*asking, return_exceptions=True)

    assert [result for result in results if not isinstance(result, InferenceFailed)] == list(range(1, 40, 2))
    assert len(setup.calls.batches) <= 40 + 6
    assert all(len(batch) == 1 for batch in setup.calls.batches[-20:])


async def test_a_call_that_is_cancelled_ends_its_requests(setup: Setup) -> None:
    (asking,) = setup.start()
    await turns()
    for task in setup.batcher.tasks:
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_callers_take_turns(setup: Setup) -> None:
    asking = setup.start(1, "a")
    await turns()
    assert setup.calls.batches == [[0]]
    asking += [*setup.start(8, "a", is_batch=True), *setup.start(5, "a"), *setup.start(3, "b")]
    await turns()
    setup.calls.may_answer.set()
    await asyncio.gather(*asking)

    batches, singles, others = set(range(1, 9)), set(range(9, 14)), {14, 15, 16}
    sent = [number for batch in setup.calls.batches[1:] for number in batch]
    assert len(others & set(sent[:7])) == len(singles & set(sent[:7])) == 3
    assert len(batches & set(sent[:9])) == 1
    assert sent[9:] == [*range(2, 9)]


@pytest.mark.parametrize("max_calls", [2, 3])
async def test_a_caller_with_no_image_under_way_may_send_one(setup: Setup, max_calls: int) -> None:
    setup.calls.max_calls = max_calls
    asking = setup.start(6, "a")
    await turns()
    usual = [[number] for number in range(max_calls)]
    assert setup.calls.batches == usual
    asking += setup.start(3, "b")
    await turns()
    assert setup.calls.batches == [*usual, [6]]
    asking += [*setup.start(1, "c"), *setup.start(1, "a")]
    await turns()

    assert setup.calls.batches == [*usual, [6]]  # only one call is extra
    assert setup.calls.are_urgent == [*[False] * max_calls, True]
    setup.calls.may_answer.set()
    assert await asyncio.gather(*asking) == list(range(11))


async def test_a_call_is_urgent_if_its_caller_has_less_than_its_part_of_the_images_under_way(setup: Setup) -> None:
    setup.calls.max_calls = 10
    asking = [task for caller in ("a", "a", "b", "b", "c", "a") for task in setup.start(1, caller)]
    await turns()

    assert setup.calls.are_urgent == [False, False, True, False, True, False]
    setup.calls.may_answer.set()
    await asyncio.gather(*asking)


async def test_an_urgent_call_has_images_of_its_caller_only(setup: Setup) -> None:
    """Those of others would make it longer, although the model takes one more."""
    setup.calls.max_calls = 2
    asking = setup.start(2, "a")
    await turns()
    setup.calls.max_calls = 0  # nothing is sent
    asking += [*setup.start(4, "a"), *setup.start(2, "b")]
    await turns()
    setup.calls.max_calls = 2
    setup.batcher.send()
    await turns()

    assert setup.calls.batches == [[0], [1], [6, 7]]
    assert setup.calls.are_urgent == [False, False, True]
    setup.calls.may_answer.set()
    await asyncio.gather(*asking)


async def test_images_of_a_higher_priority_come_first_in_calls_of_their_own(setup: Setup) -> None:
    asking = setup.start(1, "n")
    await turns()
    setup.calls.max_calls = 0  # nothing is sent
    asking += [*setup.start(3, "l", priority=LOW), *setup.start(2, "n"), *setup.start(2, "h", priority=HIGH)]
    await turns()
    setup.calls.may_answer.set()
    await turns()
    setup.calls.max_calls = 1
    setup.batcher.send()
    await asyncio.gather(*asking)

    assert setup.calls.batches == [[0], [6, 7], [4, 5], [1, 2, 3]]


async def test_only_images_of_its_own_and_lower_priorities_make_a_call_urgent(setup: Setup) -> None:
    """A caller has no right to a part of the calls that those with a higher priority use."""
    setup.calls.max_calls = 2
    asking = [*setup.start(1, "h", priority=HIGH), *setup.start(1, "h", priority=HIGH)]
    asking += [*setup.start(1, "n"), *setup.start(1, "l", priority=LOW)]
    await turns()
    assert setup.calls.batches == [[0], [1]]
    asking += setup.start(1, "i", priority=HIGH)
    await turns()

    assert setup.calls.batches == [[0], [1], [4]]
    assert setup.calls.are_urgent == [False, False, True]
    setup.calls.may_answer.set()
    await asyncio.gather(*asking)
    assert setup.calls.batches == [[0], [1], [4], [2], [3]]


async def test_calls_stay_full_beside_many_callers(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.calls.may_answer, "wait", turns)
    setup.calls.max_calls = 2

    async def ask(caller: str) -> None:
        for _ in range(10):
            await setup.start(1, caller)[0]

    await asyncio.gather(*map(ask, map(str, range(16))))

    assert sum(len(batch) < SPEC.max_batch for batch in setup.calls.batches) <= 4  # the first and last ones
    assert max(setup.calls.under_way) <= 2 + 1


async def test_images_that_are_not_sent_cost_their_caller_nothing(setup: Setup) -> None:
    asking = setup.start(1, "c")
    await turns()
    setup.calls.max_calls = 0  # nothing more is sent
    dropped = [*setup.start(8, "b"), *setup.start(8, "b", seconds=0.001)]
    await turns()
    for task in dropped[:8]:
        task.cancel()
    await asyncio.gather(*dropped, return_exceptions=True)
    asking += [*setup.start(4, "a"), *setup.start(4, "b")]
    await turns()
    setup.calls.may_answer.set()
    await turns()
    setup.calls.max_calls = 1
    setup.batcher.send()
    await asyncio.gather(*asking)

    assert setup.calls.batches == [[0], [17, 21, 18, 22], [19, 23, 20, 24]]


async def test_an_image_that_can_only_be_late_is_not_sent(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent calls took longer than it has left, and another one is under way. A single measurement decides nothing."""
    clock = Clock(monkeypatch, "app.triton.model_on_server", "app.resilience.deadline")
    setup.calls.served.forget_speed()  # measured from now
    setup.calls.max_calls = 3
    first = [*setup.start(1), *setup.start(1)]
    await turns()
    clock.now += 5
    setup.calls.may_answer.set()
    assert await asyncio.gather(*first) == [0, 1]
    setup.calls.may_answer.clear()
    under_way = setup.start(1)
    await turns()
    with pytest.raises(DeadlinePassed):
        await setup.start(1, seconds=4)[0]
    others = setup.start(1, seconds=6)
    await turns()
    setup.calls.may_answer.set()

    assert await asyncio.gather(*under_way, *others) == [2, 4]
    assert await setup.start(1, seconds=0.1)[0] == 5  # alone
