"""The routes file: what it may contain, how it is followed and written; and when the canary of a route is withdrawn."""

import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from app.resilience import last_valid, worker_table
from app.resilience.worker_table import WorkerTable
from app.routing import canary as canary_module
from app.routing import routes as routes_module
from app.routing.canary import CanaryWatch
from app.routing.route import Canary, Route, Shadow
from app.routing.routes import Routes, RoutesError
from app.telemetry.metrics import Metrics
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT, TABLE_VARIABLE, Clock, captured_log

ROUTES_TEXT = """
[detector]
to = "yolo11n:2"
canary = {to = "yolo11n:3", share = 0.05}
shadow = {to = "big", share = 0.1}
fallback = "yolo11n:1"

["v1.doors"]
to = "doors"
"""
CANARY = Canary("yolo11n:3", 0.05)
DETECTOR = Route("yolo11n:2", CANARY, Shadow("big", 0.1), "yolo11n:1")
SIMPLE = Route("yolo11n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.toml"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.last_valid")


def test_file_that_is_not_valid_is_refused(path: Path) -> None:
    for text, said in (
        ("[detector", "Expected ']'"),
        ('["a route"]\nto = "tiny"', "matching regex"),
        ('[detector]\nto = "tiny"\nweight = 1', "unknown field `weight`"),
        ('[detector]\nto = "tiny"\ncanary = {to = "new", share = nan}', "Expected `float`"),
        ('[a]\nto = "tiny"\nfallback = "a"', "[a] fallback: a is a route, not a model"),
    ):
        path.write_text(text)
        with pytest.raises(RoutesError) as refused:
            Routes(path)
        assert str(refused.value).startswith(f"{path} is not valid: ")
        assert said in str(refused.value)


@pytest.mark.parametrize("damaged", ["[detector", "", None])
def test_damaged_file_changes_nothing(path: Path, clock: Clock, damaged: str | None) -> None:
    path.write_text(ROUTES_TEXT)
    routes = Routes(path)
    path.unlink() if damaged is None else path.write_text(damaged)
    clock.now += 1
    assert routes.known == Routes(path).known == {"detector": DETECTOR, "v1.doors": Route("doors")}
    assert "routes" in last_valid.refused
    with pytest.raises(RoutesError):
        routes.put("detector", SIMPLE)
    path.write_text(ROUTES_TEXT.replace("0.05", "0.5"))
    clock.now += 1

    assert routes.known["detector"].canary == Canary("yolo11n:3", 0.5)
    assert last_valid.refused == {}


def test_processes_remember_a_valid_file_in_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text('[detector]\nto = "tiny"\n', encoding="utf-8")
    monkeypatch.setenv("NEREID_INTERNAL_LAST_VALID_FD", str(descriptor := last_valid.own()))
    Routes(path)
    reading = f"from pathlib import Path; from app.routing.routes import Routes; print(*Routes(Path({str(path)!r})).known)"
    command = [sys.executable, "-c", reading]
    done = subprocess.run(command, cwd=ROOT, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True, timeout=60, check=True)

    assert done.stdout.endswith("detector\n")


@pytest.mark.parametrize("content", [None, ""])
def test_change_is_seen_at_once_where_it_is_made_and_by_others_within_a_second(
    path: Path, clock: Clock, content: str | None
) -> None:
    """A new file, which may be empty, has no routes."""
    if content is not None:
        path.write_text(content)
    one, other = Routes(path), Routes(path)
    assert one.known == other.known == {}
    one.put("detector", DETECTOR)
    assert one.known == {"detector": DETECTOR}
    clock.now += 1
    assert other.known == {"detector": DETECTOR}
    assert [other.put("detector", None) for _ in range(2)] == [True, False]
    clock.now += 1
    assert one.known == other.known == {}


def test_writers_lose_no_change_of_each_other_and_readers_see_whole_files(path: Path) -> None:
    Routes(path).put("first", SIMPLE)
    are_done, seen = threading.Event(), set()

    def write(routes: Routes, worker: int) -> None:
        for number in range(5):
            routes.put(f"route-{worker}-{number}", DETECTOR)

    def read() -> None:
        while not are_done.is_set():
            seen.add(len(routes_module.load(path)))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(Routes(path), worker)) for worker in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    are_done.set()
    reader.join()

    assert len(Routes(path).known) == 21
    assert "routes" not in last_valid.refused
    assert 0 not in seen


def test_file_behind_a_link_is_written_with_its_mode_whatever_a_killed_writer_has_left(path: Path) -> None:
    real = path.parent / "real.toml"
    real.write_text(ROUTES_TEXT)
    real.chmod(0o640)
    path.symlink_to(real)
    (path.parent / f".{real.name}.unfinished").write_text("[half")
    Routes(path).put("detector", SIMPLE)

    assert path.is_symlink()
    assert routes_module.load(real) == {"detector": SIMPLE, "v1.doors": Route("doors")}
    assert real.stat().st_mode & 0o777 == 0o640
    assert {each.name for each in path.parent.iterdir()} == {path.name, real.name}


NEW = Canary("new:2", 0.05)
ROUTE = Route("old:1", NEW)
NAME = "detector"


class Worker:
    def __init__(self, path: Path) -> None:
        self.table = WorkerTable()
        self.metrics = Metrics(self.table, "1")
        self.routes = Routes(path)
        self.watch = CanaryWatch(self.routes, self.metrics)

    @property
    def route(self) -> Route:
        return self.routes.known[NAME]

    @property
    def withdrawn(self) -> str:
        return self.watch.withdrawn(NAME, self.route)

    def note(self, answered: int, failed: int = 0, *, seconds: float = 0.05, is_canary: bool = True) -> None:
        for number in range(answered + failed):
            self.watch.note(NAME, self.route, seconds if number < answered else None, is_canary=is_canary)


@pytest.fixture
async def workers(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    """Two workers, which have seen the route and no request."""
    monkeypatch.setattr(last_valid, "_CHECK_SECONDS", 0)
    Routes(path).put(NAME, ROUTE)
    monkeypatch.setenv(TABLE_VARIABLE, "")  # restored in the end, whatever `create` writes
    descriptor = worker_table.create()
    made = [Worker(path) for _ in range(2)]
    await refresh(made)
    yield made
    for worker in made:
        worker.table.close()
    os.close(descriptor)


async def refresh(workers: list[Worker]) -> None:
    for worker in workers:
        worker.table.refresh()
        await worker.watch.refresh()


async def test_canary_that_fails_half_of_its_requests_is_withdrawn(
    workers: list[Worker], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, canary_module)
    first, second = workers
    first.note(12, 12)
    second.note(100, is_canary=False)
    second.note(12, 13)
    await refresh(workers)
    assert first.withdrawn == second.withdrawn == ""
    second.note(1)
    await refresh(workers[::-1])
    await refresh(workers)

    reason = "25 of 50 requests in a minute failed, and 0 of 100 of the default"
    assert first.withdrawn == second.withdrawn == reason
    assert Routes(path).known == {NAME: Route("old:1", msgspec.structs.replace(NEW, withdrawn=reason))}
    assert [call.kwargs for call in log] == [{"route": NAME, "canary": "new:2", "reason": reason}]
    assert first.metrics.nonzero(first.metrics.canary_withdrawn) == {NAME: 1}


FAST, SLOW = 0.05, 0.1


@pytest.mark.parametrize(
    ("canary", "default", "changes", "is_withdrawn"),
    [
        # answered, failed, seconds
        ((50, 10, FAST), (100, 0), {}, True),
        ((48, 2, FAST), (100, 0), {}, False),  # more than 2 %, but by chance
        ((50, 50, FAST), (50, 50), {}, False),
        ((1900, 100, FAST), (2000, 20), {"max_error_rate": 0.1}, False),
        ((9, 40, FAST), (100, 0), {}, False),
        ((60, 0, SLOW), (100, 0), {}, True),
        ((60, 0, SLOW), (100, 0), {"max_p99_ratio": 4}, False),
        ((60, 0, SLOW), (49, 0), {}, False),  # too few to know the default's
        ((3, 0, 60.0), (100, 0), {}, False),  # by chance
    ],
)
async def test_canary_may_fail_a_little_more_often_and_take_a_little_longer_than_the_default(
    workers: list[Worker],
    canary: tuple[int, int, float],
    default: tuple[int, int],
    changes: dict[str, float],
    *,
    is_withdrawn: bool,
) -> None:
    worker = workers[1]
    worker.routes.put(NAME, msgspec.structs.replace(ROUTE, canary=msgspec.structs.replace(NEW, **changes)))
    await refresh(workers)
    answered, failed, seconds = canary
    worker.note(*default, is_canary=False)
    worker.note(answered, failed, seconds=seconds)
    if seconds != FAST:
        worker.note(max(0, 60 - answered))
    await refresh(workers)

    assert bool(worker.withdrawn) is is_withdrawn


async def test_changed_canary_has_failed_at_nothing(workers: list[Worker]) -> None:
    first, second = workers
    old = first.route
    first.note(50, 50)
    await refresh(workers)
    assert second.withdrawn
    second.routes.put(NAME, msgspec.structs.replace(ROUTE, canary=msgspec.structs.replace(NEW, to="new:3")))
    await refresh(workers)
    for _ in range(100):  # a request from before fails now
        first.watch.note(NAME, old, None, is_canary=True)
    second.note(60)
    await refresh(workers)

    assert first.withdrawn == second.withdrawn == ""
    assert first.metrics.nonzero(first.metrics.canary_withdrawn) == {}


async def test_canary_is_withdrawn_in_memory_while_the_file_cannot_be_written(
    workers: list[Worker], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts survive the worker that made them, and the decision the one that took it."""
    log = captured_log(monkeypatch, canary_module)
    workers[0].note(30, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "_replace", Mock(side_effect=OSError("Read-only file system")))
        workers.pop(0).table.close()
        await refresh(workers)
        workers.append(Worker(path))
        await refresh(workers)
        workers.pop(0).table.close()
        workers.append(Worker(path))
        await refresh(workers)

        assert all(worker.withdrawn for worker in workers)
        assert [call.args[0] for call in log] == ["the canary of a route is withdrawn", "the routes file cannot be written"]
        assert workers[0].route == ROUTE
    await refresh(workers)
    await refresh(workers)
    assert Routes(path).known[NAME].canary != NEW
    Routes(path).put(NAME, ROUTE)
    await refresh(workers)
    assert not any(worker.withdrawn for worker in workers)
