"""The first of identical questions answers all; whatever happens to it alone does not happen to the others."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from app.cache import flight
from app.cache.flight import Flights
from app.errors import DeadlinePassed, GatewayFull, InferenceFailed, InvalidImage, InvalidParameter
from app.resilience.deadline import Deadline
from app.resilience.fairness import LOW, NORMAL
from tests.support import eventually

KEY = b"k" * 32
FOREVER = Deadline(float("inf"))


class Finder:
    """Notes how often it is run, and finds what the test sets."""

    def __init__(self) -> None:
        self.runs: list[asyncio.Future[Any]] = []

    async def __call__(self) -> Any:  # noqa: ANN401
        self.runs.append(asyncio.get_running_loop().create_future())
        return await self.runs[-1]


async def started(flights: Flights, find: Finder, *deadlines: Deadline) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(flights.run(KEY, find, deadline)) for deadline in deadlines]
    await asyncio.sleep(0)
    return tasks


async def until_runs(find: Finder, number: int) -> None:
    await eventually(lambda: len(find.runs) == number)


async def test_waiters_without_a_permit_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_MAX_WAITING", 2)
    find, flights = Finder(), Flights()
    tasks = await started(flights, find, *[FOREVER] * 4)
    tasks[1].cancel()
    await asyncio.sleep(0)
    tasks += await started(flights, find, FOREVER)
    for number, run in enumerate(find.runs):
        run.set_result(number)
    found = await asyncio.gather(*tasks, return_exceptions=True)

    assert found[:1] + found[2:] == [(0, False), (0, True), (1, False), (0, True)]


async def test_question_does_not_wait_for_one_of_a_lower_rank() -> None:
    """A question of a batch or of a caller with low priority may wait long behind others."""
    find, flights = Finder(), Flights()
    tasks: list[asyncio.Task[Any]] = []
    for rank in ((True, NORMAL), (False, LOW), (False, NORMAL), (True, NORMAL)):
        tasks.append(asyncio.create_task(flights.run(KEY, find, FOREVER, rank)))
        await asyncio.sleep(0)
    for number, run in enumerate(find.runs):
        run.set_result(number)

    assert await asyncio.gather(*tasks) == [(0, False), (1, False), (2, False), (2, True)]
    (task,) = await started(flights, find, FOREVER)
    find.runs[3].set_result(3)
    assert await task == (3, False)


async def test_answers_are_shared_by_the_same_question_until_its_end() -> None:
    find, flights = Finder(), Flights()
    for number in range(2):
        (task,) = await started(flights, find, FOREVER)
        find.runs[number].set_result(number)
        assert await task == (number, False)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(flights.run(key, find, FOREVER)) for key in (b"a", b"b")]
    await until_runs(find, 4)
    for number in (2, 3):
        find.runs[number].set_result(number)

    assert [await task for task in tasks] == [(2, False), (3, False)]


@pytest.mark.parametrize(
    "error", [None, DeadlinePassed("late"), GatewayFull("full"), InvalidParameter("a class"), RuntimeError("a bug")]
)
async def test_waiter_takes_over_when_the_first_ends_early(error: Exception | None) -> None:
    """A class that only the replaced model had is no answer for the others."""
    find = Finder()
    first, *others = await started(Flights(), find, FOREVER, FOREVER, FOREVER)
    if error is None:
        first.cancel()
    else:
        find.runs[0].set_exception(error)
    await until_runs(find, 2)
    find.runs[1].set_result("found")

    assert await asyncio.gather(*others) == [("found", False), ("found", True)]
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)


async def test_error_of_the_image_or_the_model_is_that_of_all() -> None:
    """Each gets its own, so that no traceback refers to the frames of another request."""
    find = Finder()
    tasks = await started(Flights(), find, FOREVER, FOREVER)
    find.runs[0].set_exception(InferenceFailed("why"))
    first, second = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(second, InferenceFailed)
    assert (type(first), second.detail) == (InferenceFailed, "why")
    assert first is not second
    assert second.__cause__ is second.__context__ is None


async def test_waiter_that_is_late_or_leaves_ends_no_other() -> None:
    find = Finder()
    first, late, leaving, last = await started(Flights(), find, FOREVER, Deadline.after(0), FOREVER, FOREVER)
    with pytest.raises(DeadlinePassed):
        await late
    leaving.cancel()
    await asyncio.sleep(0)
    find.runs[0].set_result("found")

    assert [await first, await last] == [("found", False), ("found", True)]


async def test_failed_request_is_freed_at_once() -> None:
    """No cycle keeps its image until the garbage collector runs."""

    class Image:
        """Held by the frame of a request only."""

    images: list[weakref.ref[Image]] = []

    async def request(flights: Flights, find: Finder) -> None:
        image = Image()
        images.append(weakref.ref(image))
        with pytest.raises(InvalidImage):
            await flights.run(KEY, find, FOREVER)

    find, flights = Finder(), Flights()
    tasks = [asyncio.create_task(request(flights, find)) for _ in range(2)]
    await until_runs(find, 1)
    gc.disable()
    try:
        find.runs.pop().set_exception(InvalidImage("broken"))
        await asyncio.gather(*tasks)
        tasks.clear()
        assert [image() for image in images] == [None, None]
    finally:
        gc.enable()
