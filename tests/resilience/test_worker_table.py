"""Counters that all workers of a host share."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from app.resilience import worker_table
from app.resilience.worker_table import COUNTER, GAUGE, TableView, WorkerTable
from tests.machines import Machine, check
from tests.support import ROOT, TABLE_VARIABLE, OpenTable

# A worker: it counts five requests, its event loop runs three times, it says so, and lives until its stdin is closed.
WORKER = """
import sys
from app.resilience.worker_table import COUNTER, WorkerTable
table = WorkerTable()
for kind in ("", COUNTER):
    table.add(table.column(kind + "requests"), 5)
for _ in range(3):
    table.beat()
print("counted", flush=True)
sys.stdin.read()
"""


def test_worker_of_another_process_counts_from_its_start_until_it_is_killed(open_table: OpenTable) -> None:
    own = open_table()
    column, counter = own.column("requests"), own.column(COUNTER + "requests")
    command, descriptor = [sys.executable, "-c", WORKER], int(os.environ[TABLE_VARIABLE])
    for killed in (1, 2):
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"counted\n"
            assert (own.total(column), own.workers, own.beats()[worker.pid]) == (5, 2, 3)
            worker.kill()
        own.refresh()

        assert (own.total(column), own.workers, worker.pid in own.beats()) == (0, 1, False)
        assert own.total_ever(counter) == 5 * killed


KINDS = st.sampled_from(["", COUNTER, GAUGE])
NAMES = ("a", "b", "c", "d", "e", "f")
ALIASES = 4


class Worker:
    """A worker that has started, and what its table should say."""

    def __init__(self, row: int) -> None:
        self.table = WorkerTable()
        self.row = row
        self.uses: set[str] = set()
        """Names whose aliases it keeps."""
        self.overflow: set[str] = set()
        """Names for which it found no alias."""
        self.left: dict[str, float] = {}
        """When it stopped using a name, by alias."""
        self.seen: set[int] = set()
        """Rows of the workers that it knows to live."""


class Workers(Machine):
    """Workers of a host start, count, name things and end; the cells of each row, by row and key, are those of the model."""

    TIMED = ("app.resilience.worker_table",)

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(worker_table, "_SIZE", worker_table._NAMES + ALIASES * worker_table._KEY_BYTES)  # noqa: SLF001
        self.patch.setattr(worker_table, "_ALIASES", ALIASES)
        self.open_tables(0)
        self.view = TableView()
        self.living: dict[int, Worker] = {}
        self.ended: list[WorkerTable] = []
        self.columns: dict[tuple[str, str], int] = {}
        self.cells: Counter[tuple[int, str, str]] = Counter()
        """By row, kind and key; also of workers that have ended."""
        self.names: dict[str, str] = {}
        """Names by alias."""
        self.begin()

    @precondition(lambda self: len(self.living) < 4)
    @rule()
    def begin(self) -> None:
        """A worker takes the first free row, continues the counters in it, and starts everything else anew."""
        worker = Worker(min(set(range(1, 5)) - self.living.keys()))
        self.living[worker.row] = worker
        for row, kind, key in list(self.cells):
            if row == worker.row and kind != COUNTER:
                del self.cells[row, kind, key]
        for other in self.living.values():
            other.seen = set(self.living)  # as soon as it looks

    @precondition(lambda self: len(self.living) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = self.living.pop(data.draw(st.sampled_from(sorted(self.living))))
        worker.table.close()
        self.ended.append(worker.table)

    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        worker = self.any_worker(data)
        worker.table.refresh()
        worker.seen = set(self.living)
        assert worker.table.is_first == (worker.row == min(self.living))

    @rule(data=st.data(), kind=KINDS, key=st.sampled_from(["x", "y", "größe"]), value=st.integers(-3, 9), is_set=st.booleans())
    def count(self, data: st.DataObject, kind: str, key: str, value: int, is_set: bool) -> None:  # noqa: FBT001
        self.write(self.any_worker(data), kind, key, value, is_set=is_set and kind != COUNTER)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), kind=KINDS, key=st.sampled_from(["x", "y", "größe"]), name=st.sampled_from(NAMES))
    def count_after_the_end(self, data: st.DataObject, kind: str, key: str, name: str) -> None:
        """A thread may end after its worker has given its row to another worker."""
        table = data.draw(st.sampled_from(self.ended))
        column = table.column(kind + key + table.alias(name))
        table.add(column, 1)
        table.set(column, 7)
        assert table.workers == 1

    @rule(data=st.data(), name=st.sampled_from(NAMES), value=st.integers(1, 9))
    def count_by_name(self, data: st.DataObject, name: str, value: int) -> None:
        """An alias stays while any worker uses it, and ten minutes longer if another one can be had."""
        worker, others = self.any_worker(data), self.living.values()
        used = {alias for alias, known in self.names.items() if any(known in other.uses for other in others)}
        lately = {alias for other in others for alias, at in other.left.items() if at > self.clock.now - 600} - used
        worker.seen = worker.seen if name in worker.uses | worker.overflow else set(self.living)
        alias = worker.table.alias(name)
        if name in worker.overflow or (name not in self.names.values() and len(used) == ALIASES - 1):
            worker.overflow.add(name)
            assert alias not in self.names
            return
        if name not in self.names.values():
            assert alias not in used
            assert alias not in lately or len(lately) == ALIASES - 1 - len(used)
            self.names[alias] = name
            for cell in [cell for cell in self.cells if alias in cell[2]]:
                del self.cells[cell]
        assert self.names[alias] == name
        worker.uses.add(name)
        self.write(worker, COUNTER, f"calls {alias}", value)

    @rule(data=st.data(), names=st.sets(st.sampled_from(NAMES)))
    def keep(self, data: st.DataObject, names: set[str]) -> None:
        worker = self.any_worker(data)
        worker.table.keep_aliases(names)
        worker.left |= {alias: self.clock.now for alias, name in self.names.items() if name in worker.uses - names}
        worker.uses &= names
        worker.overflow &= names

    @rule(seconds=st.sampled_from([1, 500, 601]))
    def let_pass(self, seconds: int) -> None:
        self.skip(seconds)

    @rule(data=st.data(), published=st.binary(max_size=9))
    def publish(self, data: st.DataObject, published: bytes) -> None:
        self.any_worker(data).table.publish(published)
        assert self.any_worker(data).table.published() == self.view.published() == published

    def any_worker(self, data: st.DataObject) -> Worker:
        return self.living[data.draw(st.sampled_from(sorted(self.living)))]

    def write(self, worker: Worker, kind: str, key: str, value: int, *, is_set: bool = False) -> None:
        column = worker.table.column(kind + key)
        assert self.columns.setdefault((kind, key), column) == column
        (worker.table.set if is_set else worker.table.add)(column, value)
        self.cells[worker.row, kind, key] = value if is_set else self.cells[worker.row, kind, key] + value

    @invariant()
    def all_see_the_same(self) -> None:
        assert len(set(self.columns.values())) == len(self.columns)
        for worker in self.living.values():
            worker.table.total(0)  # it notices who has started
            assert {alias: name for alias, name in worker.table.aliases().items() if name} == self.names
            assert worker.table.keys(COUNTER) == [key for kind, key in self.columns if kind == COUNTER]
            assert worker.table.keys(GAUGE) == [key for kind, key in self.columns if kind == GAUGE]
            for (kind, key), column in self.columns.items():
                values = [self.cells[row, kind, key] for row in sorted(worker.seen)]
                assert worker.table.values(column) == values
                assert worker.table.total(column) == sum(values)
                assert worker.table.cells[column] == self.cells[worker.row, kind, key]
                ever = sum(value for (_, *cell), value in self.cells.items() if cell == [kind, key])
                assert kind != COUNTER or self.view.total_ever(column) == ever
            assert worker.table.rows() == sorted(worker.seen)
            assert worker.table.workers == len(worker.seen)

    def finish(self) -> None:
        self.view.close()
        for worker in self.living.values():
            worker.table.close()


@pytest.mark.parametrize("runs", [13, pytest.param(40, marks=pytest.mark.system)])
def test_workers_of_a_host(runs: int) -> None:
    check(Workers, runs=runs, steps=40)
