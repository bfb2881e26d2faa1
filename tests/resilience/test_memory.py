"""The memory that requests of all workers may use at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.errors import GatewayFull
from app.resilience.fairness import ANYBODY
from app.resilience.memory import MemoryBudget, Reservation
from app.resilience.worker_table import WorkerTable
from tests.processes import PATIENCE_SECONDS


def test_a_reservation_counts_until_the_end_of_its_block(table: WorkerTable) -> None:
    budget = MemoryBudget(table, "memory", 100)
    with budget.reserve(ANYBODY) as reservation:
        assert budget.used_bytes == 0
        reservation.add(30)
        reservation.add(50)
        assert (reservation.nbytes, budget.used_bytes) == (80, 80)

    assert (reservation.nbytes, budget.used_bytes) == (0, 0)


def test_a_reservation_above_the_limit_is_rejected(table: WorkerTable) -> None:
    budget = MemoryBudget(table, "memory", 100)
    first, second = budget.reserve(ANYBODY), budget.reserve(ANYBODY)
    first.add(60)
    second.add(10)
    with pytest.raises(GatewayFull, match="no memory left"):
        first.add(31)

    assert (first.nbytes, budget.used_bytes, budget.has_room(ANYBODY, 1)) == (60, 70, True)
    second.add(30)
    assert not budget.has_room(ANYBODY, 1)
    with pytest.raises(GatewayFull):
        second.add(1)


def test_memory_that_is_only_counted_is_never_refused(table: WorkerTable) -> None:
    budget = MemoryBudget(table, "memory", 100)
    first, second = budget.reserve(ANYBODY), budget.reserve(ANYBODY)
    first.add(100)
    second.add(50, is_refused=False)
    assert (second.nbytes, budget.used_bytes) == (50, 150)


def test_a_request_larger_than_the_limit_is_possible_alone(table: WorkerTable) -> None:
    """Otherwise it would never be possible; there is no room for it beside another request, nor for another beside it."""
    budget = MemoryBudget(table, "memory", 100)
    large, small = budget.reserve(ANYBODY), budget.reserve(ANYBODY)
    with small:
        small.add(1)
        with pytest.raises(GatewayFull):
            large.add(200)
    large.add(150)
    large.add(50)
    with pytest.raises(GatewayFull):
        small.add(1)

    assert (large.nbytes, small.nbytes, budget.used_bytes) == (200, 0, 200)


def test_a_joint_reservation_needs_room_in_each_budget(table: WorkerTable) -> None:
    small, large = MemoryBudget(table, "small", 50), MemoryBudget(table, "large", 100)
    others = large.reserve(ANYBODY)
    others.add(70)
    joint = Reservation("the images of this batch", ANYBODY, small, large)
    joint.add(20)
    assert (small.used_bytes, large.used_bytes) == (20, 90)
    with pytest.raises(GatewayFull, match=r"^the gateway has no memory left for the images of this batch$"):
        joint.add(20)
    joint.keep(10)
    assert (small.used_bytes, large.used_bytes) == (10, 80)
    joint.release()

    assert (small.used_bytes, large.used_bytes) == (0, 70)


def test_threads_count_every_byte(table: WorkerTable) -> None:
    """Decoding threads reserve memory while the event loop does."""
    budget = MemoryBudget(table, "memory", 10**9)
    barrier = threading.Barrier(8)

    def reserve() -> None:
        barrier.wait(PATIENCE_SECONDS)
        for _ in range(2000):
            with budget.reserve(ANYBODY) as reservation:
                reservation.add(3)

    with ThreadPoolExecutor(8) as executor:
        for job in [executor.submit(reserve) for _ in range(8)]:
            job.result()

    assert budget.used_bytes == 0
