"""When the canary of a route is withdrawn."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from app.resilience import last_valid, worker_table
from app.resilience.worker_table import WorkerTable
from app.routing import canary as canary_module
from app.routing import routes as routes_module
from app.routing.canary import CanaryWatch
from app.routing.route import Canary, Route
from app.routing.routes import Routes
from app.telemetry.metrics import Metrics
from tests.support import TABLE_VARIABLE, captured_log

CANARY = Canary("new:2", 0.05)
ROUTE = Route("old:1", CANARY)
NAME = "detector"


class Worker:
    """A worker of the host, which follows the routes file."""

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
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.toml"


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
    assert Routes(path).known == {NAME: Route("old:1", msgspec.structs.replace(CANARY, withdrawn=reason))}
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
    worker.routes.put(NAME, msgspec.structs.replace(ROUTE, canary=msgspec.structs.replace(CANARY, **changes)))
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
    second.routes.put(NAME, msgspec.structs.replace(ROUTE, canary=msgspec.structs.replace(CANARY, to="new:3")))
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

    def fail(*_: object) -> None:
        raise OSError("Read-only file system")

    log = captured_log(monkeypatch, canary_module)
    workers[0].note(30, 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "_replace", fail)
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
    assert Routes(path).known[NAME].canary != CANARY
    Routes(path).put(NAME, ROUTE)
    await refresh(workers)
    assert not any(worker.withdrawn for worker in workers)
