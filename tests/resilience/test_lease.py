"""What a request holds is given back when the last of its work has ended."""

import asyncio

import pytest

from app.resilience.lease import Lease


@pytest.fixture
def released() -> list[str]:
    return []


@pytest.fixture
def lease(released: list[str]) -> Lease:
    made = Lease()
    made.on_release(lambda: released.append("first"))
    made.on_release(lambda: released.append("second"))
    return made


def test_a_callback_that_fails_does_not_stop_the_others(lease: Lease, released: list[str]) -> None:
    lease.on_release(lambda: 1 // 0)
    lease.on_release(lambda: released.append("third"))
    with pytest.raises(ZeroDivisionError), lease:
        pass
    assert released == ["third", "second", "first"]
    lease.release()

    assert released == ["third", "second", "first"]


@pytest.mark.parametrize("end", ["result", "failure", "cancel"])
async def test_a_job_keeps_it_until_its_end(lease: Lease, released: list[str], end: str) -> None:
    job: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with lease:
        lease.keep_for(job)
    assert released == []
    if end == "cancel":
        job.cancel()
    elif end == "failure":
        job.set_exception(ValueError())
        assert job.exception()
    else:
        job.set_result(None)
    await asyncio.sleep(0)

    assert released == ["second", "first"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_the_last_of_several_jobs_releases_it(lease: Lease, released: list[str], order: tuple[int, ...]) -> None:
    jobs: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in order]
    with lease:
        for job in jobs:
            lease.keep_for(job)
    for index in order:
        assert released == []
        jobs[index].set_result(None)
        await asyncio.sleep(0)

    assert released == ["second", "first"]


async def test_a_job_that_ends_within_the_block_releases_nothing(lease: Lease, released: list[str]) -> None:
    """The request still uses what the lease holds."""
    job: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with lease:
        lease.keep_for(job)
        job.set_result(None)
        await asyncio.sleep(0)
        assert released == []

    assert released == ["second", "first"]


async def test_slot_taken_by_a_job_after_the_block_is_given_back(lease: Lease, released: list[str]) -> None:
    """A decoding thread may take a slot after its request has ended."""
    job: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with lease:
        lease.keep_for(job)
    lease.on_release(lambda: released.append("slot"))
    job.set_result(None)
    await asyncio.sleep(0)

    assert released == ["slot", "second", "first"]
