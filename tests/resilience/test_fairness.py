"""How much of a resource each caller may use, and whose work is next."""

from collections import Counter
from itertools import cycle

import pytest

from app.resilience.fairness import ANYBODY, HIGH, LOW, Caller, CallerCounts, FairQueue, Turn, caller_at
from app.resilience.worker_table import CALLER, WorkerTable
from tests.support import OpenTable

A, B = Caller("a"), Caller("b")


def take(counts: CallerCounts, limit: int, *callers: Caller) -> list[int]:
    """Let callers take one after the other, in turn, until none finds room; return what each has."""
    refused = 0
    for caller in cycle(callers):
        if counts.has_room(caller, limit, 1):
            counts.add(caller, 1)
            refused = 0
        elif (refused := refused + 1) == len(callers):
            break
    return [counts.of(caller) for caller in callers]


@pytest.mark.parametrize("limit", [1, 4, 10, 100])
def test_caller_alone_has_the_whole_limit_and_a_second_one_still_finds_room(open_table: OpenTable, limit: int) -> None:
    one, other = (CallerCounts(open_table(), "x") for _ in range(2))
    assert take(one, limit, A) == [limit]
    (taken,) = take(other, limit, B)
    assert taken >= limit // 10 - 1
    assert one.total == other.total == limit + taken <= 1.1 * limit + 1
    assert not one.has_room(A, limit, 1)
    one.add(A, limit)
    other.add(B, -taken)
    assert [other.has_place(caller, limit, 1) for caller in (A, B)] == [False, True]  # a first request
    other.add(B, 1)
    assert not other.has_place(B, limit, 1)
    one.add(A, -2 * limit)
    other.add(B, -1)

    assert (one.total, one.in_worker, one.of_in_worker(A)) == (0, 0, 0)
    assert take(one, limit, B) == [limit]


@pytest.mark.parametrize("callers", [2, 5])
def test_greedy_callers_get_equal_parts(table: WorkerTable, callers: int) -> None:
    counts = CallerCounts(table, "x")
    first, *others = [Caller(str(number)) for number in range(callers)]
    take(counts, 100, first)
    for _ in range(1000):
        counts.add(max([first, *others], key=counts.of), -1)
        take(counts, 100, *others, first)
    parts = [counts.of(caller) for caller in (first, *others)]

    assert max(parts) - min(parts) <= 9
    assert counts.total >= 100


def test_callers_for_whom_no_column_is_left_are_one_caller(table: WorkerTable) -> None:
    for number in range(9_000):
        table.column(CALLER + str(number))
    counts, others = CallerCounts(table, "x"), CallerCounts(table, "y")
    others.add(A, 100)
    counts.add(A, 2)
    counts.add(B, 3)

    assert counts.total == counts.in_worker == counts.of(A) == counts.of_in_worker(B) == 5
    assert (counts.has_room(A, 6, 1), counts.has_room(A, 5, 1)) == (True, False)


@pytest.mark.parametrize(
    ("others", "expected", "has_little"),
    [([], 5, False), ([1], 6, False), ([5], 10, False), ([100], 10, True), ([5, 5, 5, 5], 25, False), ([100] * 3, 20, True)],
)
def test_caller_waits_for_as_much_of_others_as_it_has(
    table: WorkerTable, others: list[int], expected: int, *, has_little: bool
) -> None:
    counts = CallerCounts(table, "x")
    counts.add(A, 5)
    for number, amount in enumerate(others):
        counts.add(Caller(str(number)), amount)

    assert (counts.until_served(A), counts.until_served(ANYBODY)) == (expected, 0)
    assert counts.has_little(A) is has_little


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "", False),
    ],
)
def test_addresses_of_one_network_of_ipv6_are_one_caller(one: str, other: str, *, is_same: bool) -> None:
    assert (caller_at(one) == caller_at(other)) is is_same
    assert caller_at("") == ANYBODY
    assert len({caller_at(f"10.0.{number // 256}.{number % 256}") for number in range(1000)}) <= 256


class Work:
    """Work that waits for its turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    @property
    def name(self) -> str:
        """The name of the caller, in capitals for images of batches."""
        return self.turn.caller.name.upper() if self.turn.is_batch else self.turn.caller.name


class Queue(FairQueue[Work]):
    def more(self, caller: Caller, number: int, cost: float = 1.0, *, is_batch: bool = False) -> list[Work]:
        added = [Work(Turn(caller, cost, is_batch)) for _ in range(number)]
        for work in added:
            self.add(work)
        return added

    def run(self, number: int) -> str:
        """Begin the next ones; return their names."""
        names = ""
        for _ in range(number):
            work = self.next()
            assert work is not None
            assert work is self.in_turn()[0]
            self.begin(work)
            names += work.name
        return names


def test_callers_take_turns_however_much_they_have() -> None:
    work = Queue()
    for dropped in work.more(B, 100):  # what is discarded costs nothing
        work.discard(dropped)
        work.discard(dropped)
    assert (len(work), work.next()) == (0, None)
    work.more(A, 100)
    assert work.run(10) == "a" * 10
    work.more(B, 100)
    assert Counter(work.run(40)) == {"a": 20, "b": 20}
    work.more(Caller("c"), 5)

    assert Counter(work.run(15)) == {"a": 5, "b": 5, "c": 5}
    assert Counter(work.run(10)) == {"a": 5, "b": 5}


@pytest.mark.parametrize(
    ("fraction", "cost", "others", "expected"),
    [(0.5, 1, 1, 20), (0.75, 1, 1, 30), (0.5, 1, 4, 20), (0.1, 1, 1, 20), (0.5, 4, 1, 8)],
)
def test_turns_are_weighed_by_share_and_cost(fraction: float, cost: float, others: int, expected: int) -> None:
    work = Queue()
    for number in range(others):
        work.more(Caller(str(number), 1 - fraction), 100)
    work.more(Caller("s", fraction, has_share=True), 100, cost)

    assert Counter(work.run(40))["s"] == pytest.approx(expected, abs=2)


def test_images_of_batches_come_behind_single_ones() -> None:
    work = Queue()
    work.more(A, 50, is_batch=True)
    work.more(A, 8)
    work.more(B, 8)
    assert Counter(work.run(18)) == {"A": 2, "a": 8, "b": 8}


def test_higher_priorities_come_first_and_lower_ones_take_turns_in_what_is_left() -> None:
    work = Queue()
    for priority in (LOW, HIGH):
        work.more(A._replace(priority=priority), 10, is_batch=True)
        work.more(B._replace(priority=priority), 2)
    work.more(Caller("n"), 2)
    assert sorted(one.name for one in work.in_turn()) == ["A"] * 10 + ["b"] * 2
    assert sorted(work.run(12)) == ["A"] * 10 + ["b"] * 2
    assert work.run(2) == "nn"
    work.more(B._replace(priority=LOW), 8)
    turns = ""
    for _ in range(10):
        work.more(Caller("h", priority=HIGH), 5)
        turns += work.run(6).removeprefix("hhhhh")
    assert Counter(turns) == {"A": 2, "b": 8}


def test_work_of_a_failed_call_comes_before_other_work_of_its_caller() -> None:
    work = Queue()
    first, second, *others = work.more(A, 4)
    for one in (first, second):
        work.begin(one)
    work.add_again([first, second])

    assert work.in_turn() == [first, second, *others]
