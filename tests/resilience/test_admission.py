"""What is admitted on the whole host: bodies that are received, and requests in progress."""

import asyncio

import pytest

from app.errors import GatewayFull
from app.resilience.admission import Admission, Capacity
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.model_queue import Permit
from app.resilience.worker_table import WorkerTable
from tests.support import OpenTable

CAPACITY = Capacity(
    max_uploads=2,
    upload_bytes=100,
    memory_bytes=1000,
    max_requests=2,
    target_seconds=2.0,
    decode_threads=2,
    anonymous_bytes=100,
)


@pytest.fixture
def admission(table: WorkerTable) -> Admission:
    return Admission(table, CAPACITY)


async def admit(admission: Admission, model: str = "tiny", nbytes: int = 10, parallel_images: int = 1) -> Permit:
    memory = admission.memory.reserve(ANYBODY)
    memory.add(nbytes)
    try:
        return await admission.admit(model, parallel_images, memory, Deadline.after(60))
    except BaseException:
        memory.release()
        raise


async def test_a_request_holds_its_memory_until_it_ends(admission: Admission) -> None:
    with await admit(admission, nbytes=600):
        assert admission.memory.used_bytes == 600
        with pytest.raises(GatewayFull, match="no memory left"):
            await admit(admission, nbytes=401)
        assert admission.memory.used_bytes == 600
    assert admission.memory.used_bytes == 0

    with await admit(admission, nbytes=1000):
        assert not admission.memory.has_room(ANYBODY, 1)


async def test_a_request_that_is_rejected_holds_no_memory(admission: Admission) -> None:
    """Memory held by a rejected request would never be released."""
    permits = [await admit(admission) for _ in range(2)]
    with pytest.raises(GatewayFull, match="as many requests"):
        await admit(admission)

    assert admission.memory.used_bytes == 20
    for permit in permits:
        permit.release()
    assert admission.memory.used_bytes == 0


async def test_a_request_that_is_cancelled_while_it_waits_holds_no_memory(table: WorkerTable) -> None:
    admission = Admission(table, CAPACITY._replace(max_requests=1))
    with await admit(admission) as permit:
        permit.measure()  # the model is quick, so it is worth waiting
    with await admit(admission):
        waiting = asyncio.create_task(admit(admission))
        await asyncio.sleep(0)
        assert admission.memory.used_bytes == 20
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert admission.memory.used_bytes == 10


async def test_an_early_check_rejects_what_would_not_be_admitted(admission: Admission) -> None:
    admission.check("tiny")
    with await admit(admission), await admit(admission):
        with pytest.raises(GatewayFull):
            admission.check("tiny")
        admission.check("other")
        with await admit(admission, "other"):
            admission.check("other")

    admission.check("tiny")


async def test_a_full_memory_rejects_every_request_early(admission: Admission) -> None:
    with await admit(admission, nbytes=1000):
        for model in ("tiny", "other"):
            with pytest.raises(GatewayFull, match="the memory for images is in use"):
                admission.check(model)

    admission.check("tiny")


async def test_only_so_many_bodies_are_received(admission: Admission) -> None:
    first = admission.start_upload(ANYBODY)
    with first, admission.start_upload(ANYBODY), pytest.raises(GatewayFull, match="too many request bodies"):
        admission.check("tiny")

    with admission.start_upload(ANYBODY):
        admission.check("tiny")


async def test_bytes_of_bodies_have_a_limit(admission: Admission) -> None:
    with admission.start_upload(ANYBODY) as one:
        one.add(60)
        with admission.start_upload(ANYBODY) as other:
            with pytest.raises(GatewayFull):
                other.add(41)
            other.add(40)
        admission.check("tiny")
        one.add(40)
        with pytest.raises(GatewayFull, match="the memory for images is in use"):
            admission.check("tiny")

    admission.check("tiny")


async def test_workers_of_a_host_count_together(open_table: OpenTable) -> None:
    one, other = (Admission(open_table(), CAPACITY) for _ in range(2))
    with one.start_upload(ANYBODY), other.start_upload(ANYBODY):
        for admission in (one, other):
            with pytest.raises(GatewayFull, match="too many request bodies"):
                admission.check("tiny")
    with await admit(one, nbytes=600), pytest.raises(GatewayFull, match="no memory left"):
        await admit(other, nbytes=401)
    with await admit(one), await admit(other):
        for admission in (one, other):
            with pytest.raises(GatewayFull, match="as many requests"):
                admission.check("tiny")

    for admission in (one, other):
        admission.check("tiny")
        assert admission.memory.used_bytes == 0


@pytest.mark.parametrize(("parallel_images", "expected"), [(1, 128), (64, 128), (100, 200)])
async def test_the_largest_limit_suits_the_model(table: WorkerTable, parallel_images: int, expected: int) -> None:
    """Without a setting it is 128, or two full batches per instance."""
    admission = Admission(table, CAPACITY._replace(max_requests=0, target_seconds=1e6, memory_bytes=10**6))
    with await admit(admission, parallel_images=parallel_images) as permit:
        permit.measure()
    permits = [await admit(admission, parallel_images=parallel_images) for _ in range(expected)]
    with pytest.raises(GatewayFull):
        await admit(admission, parallel_images=parallel_images)

    for permit in permits:
        permit.release()
