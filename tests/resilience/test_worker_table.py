"""Counters that all workers of a host share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.resilience import worker_table
from app.resilience.worker_table import COUNTER, GAUGE, TableView, WorkerTable
from tests.fakes.clock import Clock
from tests.support import ROOT, TABLE_VARIABLE, OpenTable

# A worker: it counts five requests, says so, and lives until its stdin is closed.
WORKER = """
import sys
from app.resilience.worker_table import WorkerTable
table = WorkerTable()
table.add(table.column("requests"), 5)
print("counted", flush=True)
sys.stdin.read()
"""

# A worker whose event loop has run three times.
BEATING_WORKER = """
import sys
from app.resilience.worker_table import WorkerTable
table = WorkerTable()
for _ in range(3):
    table.beat()
print("beating", flush=True)
sys.stdin.read()
"""

# A parent that starts workers by fork, as Granian does, and prints what the last of them sees.
PARENT = """
import os
from app.resilience import worker_table
from app.resilience.worker_table import WorkerTable
worker_table.create()
done, counted = os.pipe(), os.pipe()
for number in range(3):
    if os.fork() == 0:
        table = WorkerTable()
        table.add(table.column("requests"), 1 + number)
        os.write(counted[1], b"x")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    os.read(counted[0], 1)
table = WorkerTable()
column = table.column("requests")
print(table.workers, sorted(table.values(column)), table.total(column))
os.close(done[1])
for _ in range(3):
    os.wait()
table.refresh()
print(table.workers, table.values(column))
"""

# Opens tables until the rows are used up.
CROWD = """
from app.host.processes import raise_file_limit
from app.resilience import worker_table
from app.resilience.worker_table import WorkerTable
raise_file_limit()
worker_table.create()
tables = []
try:
    while True:
        tables.append(WorkerTable())
except OSError as error:
    print(len(tables), error)
"""


@contextmanager
def running_worker(script: str = WORKER) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker that has done its work, which is to count five requests unless another script is given."""
    descriptor = int(os.environ[TABLE_VARIABLE])
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() in {b"counted\n", b"beating\n"}
        yield worker
        worker.kill()


def output(script: str) -> list[str]:
    """Run a script in a new process and return the lines it prints."""
    environ = {name: value for name, value in os.environ.items() if name != TABLE_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_all_workers_see_the_sum(open_table: OpenTable) -> None:
    """Each worker writes its own cell, and all of them read the total and the single values."""
    first, second = open_table(), open_table()
    column = first.column("requests")
    first.add(column, 3)
    first.add(column, -1)
    second.set(second.column("requests"), 5)

    assert (first.workers, second.workers) == (2, 2)
    assert first.total(column) == second.total(second.column("requests")) == 7
    assert sorted(first.values(column)) == [2, 5]


def test_a_key_has_the_same_column_in_all_workers(open_table: OpenTable) -> None:
    """The column depends on the key alone, not on the order in which workers ask for keys."""
    first, second = open_table(), open_table()
    columns = {key: first.column(key) for key in ("a", "b", "c")}

    assert {key: second.column(key) for key in ("c", "b", "a")} == columns
    assert len(set(columns.values())) == 3
    assert second.column("d") not in columns.values()


def test_keys_are_known_to_all_workers(open_table: OpenTable) -> None:
    first, second = open_table(), open_table()
    first.column(GAUGE + "größe")
    second.column(GAUGE + "b")
    second.column(COUNTER + "b")
    second.column("c")

    assert first.keys(GAUGE) == second.keys(GAUGE) == ["größe", "b"]
    assert first.keys(COUNTER) == second.keys(COUNTER) == ["b"]
    assert len({first.column(COUNTER + "b"), second.column(COUNTER + "b"), first.column(GAUGE + "b"), first.column("b")}) == 3


def test_keys_that_are_too_long_share_a_column(table: WorkerTable) -> None:
    """They are not known by name, but what is counted there disturbs no other key."""
    longest, longer = "x" * 384, "x" * 385

    longest = longest.removeprefix("x" * len("gauge "))
    assert table.column(GAUGE + longer) == table.column("y" * 1000) != table.column(GAUGE + longest)
    assert table.keys(GAUGE) == [longest]


def test_more_keys_than_columns_share_the_last_one(table: WorkerTable) -> None:
    columns = [table.column(str(number)) for number in range(17_000)]

    assert len(set(columns)) == 16_384
    assert set(columns[16_383:]) == {16_383}


def test_metrics_leave_columns_to_others(table: WorkerTable) -> None:
    metrics = [table.column(GAUGE + str(number)) for number in range(7_000)] + [
        table.column(COUNTER + str(number)) for number in range(7_000)
    ]
    columns = [table.column(str(number)) for number in range(4_000)]

    assert len(set(metrics)) < 14_000
    assert not set(columns) & set(metrics)
    assert len(set(columns)) == 4_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.worker_table")


@pytest.mark.usefixtures("clock")
def test_an_alias_is_the_same_in_all_workers(open_table: OpenTable) -> None:
    first, second = open_table(), open_table()
    a, b = first.alias("a"), second.alias("b")

    assert a == second.alias("a") != b == first.alias("b")
    assert first.aliases() == second.aliases()
    assert (first.aliases()[a], first.aliases()[b]) == ("a", "b")


def test_the_columns_of_a_name_that_has_gone_are_used_again(open_table: OpenTable, clock: Clock) -> None:
    """What was counted can still be read for ten minutes; then it is no more, in no worker."""
    first, second = open_table(), open_table()
    for worker in (first, second):
        worker.add(worker.column(COUNTER + f"calls {worker.alias('a')}"), 5)
    gone = first.alias("a")
    for worker in (first, second):
        worker.keep_aliases(["b"])
    assert second.alias("b") != gone
    assert second.total_ever(second.column(COUNTER + f"calls {gone}")) == 10
    clock.now += 601
    assert first.alias("c") == second.alias("c") == gone

    assert second.aliases()[gone] == "c"
    assert second.total_ever(second.column(COUNTER + f"calls {gone}")) == 0


def test_a_name_that_comes_back_goes_on(open_table: OpenTable, clock: Clock) -> None:
    own = open_table()
    alias = own.alias("a")
    own.add(own.column(COUNTER + f"calls {alias}"), 5)
    own.keep_aliases([])
    clock.now += 601

    assert own.alias("a") == alias
    assert own.total_ever(own.column(COUNTER + f"calls {alias}")) == 5


def test_the_columns_of_a_name_that_another_worker_uses_stay(open_table: OpenTable, clock: Clock) -> None:
    """It may not have noticed yet that the name has gone; one that was killed will not."""
    own, late = open_table(), WorkerTable()
    alias = late.alias("a")
    assert own.alias("a") == alias
    own.keep_aliases([])
    clock.now += 10_000
    late.add(late.column(COUNTER + f"calls {alias}"), 1)
    assert own.alias("b") != alias
    assert own.total_ever(own.column(COUNTER + f"calls {alias}")) == 1
    late.close()

    assert own.alias("c") == alias


@pytest.mark.usefixtures("clock")
def test_more_names_than_aliases(table: WorkerTable) -> None:
    """Those that find none share one that has no name; once others are gone, their aliases are taken at once."""
    aliases = [table.alias(str(number)) for number in range(300)]
    assert len(set(aliases)) == 256
    assert table.aliases()[aliases[299]] == ""
    table.keep_aliases({"299"})

    assert table.alias("300") in set(aliases[:255])


def test_counters_of_killed_workers_count(open_table: OpenTable) -> None:
    own = open_table()
    column = own.column(COUNTER + "requests")
    own.add(column, 1)
    with running_worker(WORKER.replace('"requests"', repr(COUNTER + "requests"))) as worker:
        assert own.total_ever(column) == 6
        worker.kill()
        worker.wait()
    assert own.total_ever(column) == 6
    following = open_table()
    following.add(following.column(COUNTER + "requests"), 1)

    assert own.total_ever(column) == 7


def test_a_worker_that_was_killed_does_not_count(open_table: OpenTable) -> None:
    """Its requests are forgotten at the next refresh, without any help of its own."""
    own = open_table()
    column = own.column("requests")
    own.add(column, 1)
    with running_worker() as worker:
        own.refresh()
        assert (own.workers, own.total(column)) == (2, 6)
        worker.kill()
        worker.wait()
        own.refresh()

        assert (own.workers, own.total(column)) == (1, 1)


def test_a_worker_that_starts_is_counted_at_once(open_table: OpenTable) -> None:
    """Also one in another process, and one that takes the row of a killed one: limits of the host hold from its start."""
    own = open_table()
    column = own.column("requests")
    for _ in range(2):
        with running_worker():
            assert own.total(column) == 5
            assert own.workers == 2
        own.refresh()
        assert own.workers == 1


def test_workers_inherit_the_table_through_fork() -> None:
    """Each child that Granian forks has a row of its own, although all inherit one descriptor."""
    assert output(PARENT) == ["4 [0, 1, 2, 3] 6", "1 [0]"]


def test_a_closed_table_gives_its_row_back(open_table: OpenTable) -> None:
    own = open_table()
    for _ in range(600):
        WorkerTable().close()
    own.refresh()

    assert own.workers == 1


def test_what_is_counted_after_the_end_counts_nowhere(open_table: OpenTable) -> None:
    """A thread may end after its worker has given its row to another worker."""
    own, ending = open_table(), WorkerTable()
    column = own.column("requests")
    ending.add(ending.column("requests"), 1)
    ending.close()
    following = open_table()
    ending.add(column, -1)
    ending.set(column, 7)

    ending.add(ending.column("another key"), 7)
    ending.add(ending.column(COUNTER + "another key"), 7)

    assert own.total(column) == following.total(column) == 0
    assert own.total(own.column("another key")) == own.total_ever(own.column(COUNTER + "another key")) == 0
    assert ending.workers == 1


def test_more_workers_than_rows_are_an_error() -> None:
    assert output(CROWD) == ["511 there are more workers than rows in their table"]


def test_a_table_that_nobody_has_created_is_private(table: WorkerTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes without a common parent, such as two tests, do not count together."""
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    other = WorkerTable()
    other.add(other.column("requests"), 5)
    table.refresh()

    assert (table.workers, table.total(table.column("requests"))) == (1, 0)
    other.close()


def test_the_descriptor_is_not_passed_on_to_other_programs(open_table: OpenTable) -> None:
    """A program that a worker starts and leaves behind would otherwise keep its row locked."""
    own = open_table()
    other = WorkerTable()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        other.close()
        own.refresh()
        assert program.poll() is None
        program.kill()

    assert own.workers == 1


def test_the_table_is_created_once(open_table: OpenTable) -> None:
    """Whoever creates it again gets the descriptor of the same one, and what is counted in it stays."""
    own = open_table()
    own.add(own.column("requests"), 5)

    assert worker_table.create() == int(os.environ[TABLE_VARIABLE])
    assert open_table().total(own.column("requests")) == 5


@pytest.fixture
def view(open_table: OpenTable) -> Iterator[TableView]:  # noqa: ARG001 - it creates the table
    """A view of a host's table, in which there is no worker yet."""
    view = TableView()
    yield view
    view.close()


def test_beats_are_those_of_living_workers(view: TableView) -> None:
    """They are counted by process; those of a worker that was killed are forgotten at once."""
    assert view.beats() == {}
    with running_worker(BEATING_WORKER) as first, running_worker(BEATING_WORKER) as second:
        assert view.beats() == {first.pid: 3, second.pid: 3}
        first.kill()
        first.wait()

        assert view.beats() == {second.pid: 3}


def test_the_next_worker_starts_without_beats(view: TableView, open_table: OpenTable) -> None:
    """It takes the row of one that was killed, but not its beats nor its process id."""
    with running_worker(BEATING_WORKER):
        pass
    own = open_table()
    assert os.getpid() not in view.beats()
    own.beat()

    assert view.beats() == {os.getpid(): 1}
