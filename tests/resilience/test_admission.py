"""What is admitted on the whole host: bodies, memory and pixels to decode, which are given back; what many ask for is done once."""

import asyncio
from contextlib import ExitStack, suppress

import pytest

from app.errors import GatewayFull
from app.resilience.admission import Admission, Capacity
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.fairness import ANYBODY, SHADOW, Caller
from app.resilience.interruption import Interruption
from app.resilience.memory import MemoryBudget
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.pacer import RejectionPacer
from app.resilience.single_flight import SingleFlight
from app.resilience.uploads import AnonymousUploads
from app.resilience.worker_table import WorkerTable
from tests.support import OpenTable, in_cycles
from tests.world import time_of_app

CAPACITY = Capacity(
    max_uploads=2,
    upload_bytes=100,
    memory_bytes=1000,
    max_requests=2,
    target_seconds=2.0,
    decode_threads=2,
    anonymous_bytes=100,
)
MP = 10**6
"""Takes 12 ms to decode at first."""


async def admit(admission: Admission, model: str = "tiny", nbytes: int = 10, parallel_images: int = 1) -> Permit:
    with admission.memory.reserve(ANYBODY) as memory:
        memory.add(nbytes)
        return await admission.admit(model, parallel_images, memory, Deadline.after(60))


async def test_request_is_rejected_early_while_workers_of_the_host_have_no_room(open_table: OpenTable) -> None:
    one, other = (Admission(open_table(), CAPACITY) for _ in range(2))

    def rejects(message: str, *models: str) -> None:
        for admission in (one, other):
            for model in models:
                with pytest.raises(GatewayFull, match=message):
                    admission.check(model)

    with one.start_upload(ANYBODY) as first, other.start_upload(ANYBODY) as second:
        rejects("too many request bodies", "tiny", "other")
        first.add(60)
        with pytest.raises(GatewayFull):
            second.add(41)
        second.add(40)
    with one.start_upload(ANYBODY) as first:
        first.add(100)
        rejects("the memory for images is in use", "tiny", "other")
    with await admit(one, nbytes=600):
        with pytest.raises(GatewayFull, match="no memory left"):
            await admit(other, nbytes=401)
        with await admit(other, nbytes=400):
            rejects("the memory for images is in use", "tiny", "other")
    with await admit(one), await admit(other):
        rejects("as many requests", "tiny")
        other.check("other")
        with pytest.raises(GatewayFull, match="as many requests"):
            await admit(one)
        assert one.memory.used_bytes == 20

    for admission in (one, other):
        admission.check("tiny")
        assert (admission.memory.used_bytes, admission.own_bytes) == (0, 0)


async def test_batch_is_refused_early_if_the_images_ahead_take_twice_the_target(
    open_table: OpenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelQueue, "pace", lambda _: 1.0)
    admission = Admission(open_table(), CAPACITY)
    images = admission.batch_queue("tiny", 1)
    with await images.admit(Deadline.after(60)):
        asking = [asyncio.ensure_future(images.admit(Deadline.after(60))) for _ in range(3)]
        await asyncio.sleep(0)
        admission.check("tiny", is_batch=True)
        asking.append(asyncio.ensure_future(images.admit(Deadline.after(60))))
        await asyncio.sleep(0)
        with pytest.raises(GatewayFull, match="as many requests"):
            admission.check("tiny", is_batch=True)
        admission.check("tiny", Caller("other"), is_batch=True)
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)


async def test_interrupted_block_leaves_no_reference_cycle() -> None:
    with in_cycles(GatewayFull) as kept, suppress(GatewayFull), Interruption() as block:
        asyncio.get_running_loop().call_soon(block.interrupt, GatewayFull("full"))
        await asyncio.sleep(60)

    assert not kept


def test_reservation_above_the_limit_is_rejected_unless_it_is_alone(table: WorkerTable) -> None:
    """One larger than the limit would otherwise never be possible."""
    budget = MemoryBudget(table, "memory", 100)
    first, second = budget.reserve(ANYBODY), budget.reserve(ANYBODY)
    with first, second:
        first.add(60)
        second.add(10)
        with pytest.raises(GatewayFull, match="no memory left"):
            first.add(31)
        assert (first.nbytes, budget.used_bytes, budget.has_room(ANYBODY, 1)) == (60, 70, True)
        second.add(30)
        assert not budget.has_room(ANYBODY, 1)
        second.add(50, is_refused=False)  # which is only counted
    assert (first.nbytes, budget.used_bytes) == (0, 0)
    first.add(150)
    first.add(50)
    with pytest.raises(GatewayFull):
        second.add(1)
    assert (first.nbytes, second.nbytes, budget.used_bytes) == (200, 0, 200)


@pytest.mark.parametrize(
    ("one", "same", "room"),
    [
        ("192.0.2.1", "192.0.2.1", 8),
        ("2001:db8::{}", "2001:db8::ffff:0", 8),  # a /64 network belongs to one customer
        ("192.0.2.{}", "192.0.2.99", 64),
    ],
)
def test_anonymous_bodies_of_an_address_and_of_a_host_are_limited(open_table: OpenTable, one: str, same: str, room: int) -> None:
    workers = [AnonymousUploads(open_table(), 100) for _ in range(2)]
    for _ in range(2):  # everything is given back
        with ExitStack() as stack:
            for number in range(room):
                workers[0].check(same, 0)
                stack.enter_context(workers[number % 3 // 2].start(one.format(number)))
            for worker in workers:
                with pytest.raises(GatewayFull, match="whose API key is not known yet"):
                    worker.check(same, 0)
                with pytest.raises(GatewayFull, match="whose API key is not known yet") as caught:
                    worker.start(same)
                assert (caught.value.reason, caught.value.retry_after_seconds) == ("uploads", 1)
            if room == 8:
                stack.enter_context(workers[0].start("2001:db8:0:1::1"))


@pytest.mark.parametrize(
    ("pixels", "seconds", "priority", "counts", "is_accepted"),
    [
        (40 * MP, 5, 1, True, False),  # two threads decode 417 megapixels in half of the time
        (40 * MP, 6, 1, True, True),
        (MP - 1, 1, 1, False, True),  # it is decoded in next to no time
        (40 * MP, 1, SHADOW, False, True),  # it has a thread of its own
    ],
)
def test_large_images_of_all_workers_take_less_than_half_of_the_time(  # noqa: PLR0913 - a table
    open_table: OpenTable, pixels: int, seconds: float, priority: int, *, counts: bool, is_accepted: bool
) -> None:
    one, other = (DecodeBacklog(open_table(), threads=2) for _ in range(2))
    with one.add(390 * MP, Deadline.after(1), ANYBODY):  # the only one may always be tried
        caller = Caller(priority=priority)
        if is_accepted:
            with other.add(pixels, Deadline.after(seconds), caller):
                assert one.pixels == 390 * MP + pixels * counts
        else:
            with pytest.raises(GatewayFull, match="would take too long") as caught:
                other.add(pixels, Deadline.after(seconds), caller)
            assert caught.value.retry_after_seconds == 3
        assert one.pixels == 390 * MP

    assert other.pixels == 0


async def test_concurrent_calls_share_one_execution() -> None:
    """It goes on when a caller is cancelled, and its result is not kept."""
    flight, runs, may_end = SingleFlight[int](), iter((1, 2)), asyncio.Event()

    async def work() -> int:
        run = next(runs)
        await may_end.wait()
        return run

    first, *tasks = [asyncio.create_task(flight.run("a", work)) for _ in range(5)]
    for _ in range(3):
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    may_end.set()

    assert await asyncio.gather(*tasks) == [1] * 4
    assert await flight.run("a", work) == 2


async def test_rejections_of_a_caller_above_a_rate_wait_two_seconds_and_those_of_others_do_not() -> None:
    pacer, many = RejectionPacer(), Caller("many")
    with time_of_app() as time:
        rejections = [asyncio.create_task(pacer.pace(many, 0)) for _ in range(200)]
        await pacer.pace(Caller("other"), 0)
        await asyncio.sleep(0)
        assert (rejections[59].done(), rejections[-1].done()) == (True, False)  # those of three seconds do not wait
        await time.skip(2.51)
        await asyncio.gather(*rejections)
