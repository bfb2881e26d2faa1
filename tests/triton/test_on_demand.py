"""Models are loaded at their first request; the least recently used one leaves, never one that is used or a default one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from app.errors import ModelNotReady, TritonUnavailable
from app.resilience.fairness import Caller
from app.resilience.model_queue import total_key
from app.resilience.worker_table import WorkerTable
from app.triton import on_demand
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.transport import Transport
from tests.fakes.triton import LoadingTriton, serving
from tests.support import OpenTable, eventually

SECONDS = 30.0
FAILS = grpc.StatusCode.INTERNAL, "load failed"


class Host:
    """Workers of a host, with one Triton and the models `default` and `a` to `e`, of which three may be loaded."""

    def __init__(self, fake: LoadingTriton, repository: Path, open_table: OpenTable) -> None:
        self.fake = fake
        self.tables: list[WorkerTable] = []
        self.pools: list[TritonPool] = []
        self.repository = repository
        self.ahead = 10**10
        """By this the clock of last uses is ahead of the real one, nanoseconds."""
        self._open_table = open_table
        for name in ("default", *"abcde"):
            (repository / name / "1").mkdir(parents=True)

    def worker(self, limit: int = 3) -> ModelsOnDemand:
        table = self._open_table()
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(self.fake.url), table)])
        self.tables.append(table)
        self.pools.append(pool)
        return ModelsOnDemand(pool, table, self.repository, limit, lambda: {"default"})

    def skip(self, seconds: float) -> None:
        self.ahead += int(seconds * 1e9)

    async def load(self, worker: ModelsOnDemand, *names: str) -> None:
        """Load models, one after the other, each a while after the one before was used."""
        for name in names:
            await worker.load(name, SECONDS)
            self.skip(2)


@pytest.fixture
async def host(tmp_path: Path, open_table: OpenTable, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    fake = LoadingTriton()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(fake))
        host = Host(fake, tmp_path, open_table)
        monkeypatch.setattr(on_demand, "monotonic_ns", lambda: time.monotonic_ns() + host.ahead)
        monkeypatch.setattr(on_demand, "_ROOM_SECONDS", 0.2)
        yield host
        fake.may_load.set()
        for pool in host.pools:
            await pool.close()


async def test_least_recently_used_model_leaves(host: Host) -> None:
    """Other workers notice that."""
    one, other = host.worker(), host.worker()
    await host.load(one, "default", "a", "b")
    await host.load(other, "b")
    with one.using("a"):
        pass
    host.skip(2)
    await host.load(one, "c")
    assert host.fake.loaded == {"default", "a", "c"}
    assert [one.has(name) for name in "abc"] == [True, False, True]
    assert not other.has("b")
    await host.load(other, "b")

    assert other.has("b")
    assert host.fake.told == ["load a", "load b", "unload b", "load c", "unload a", "load b"]


async def test_model_in_use_stays(host: Host) -> None:
    one, other = host.worker(), host.worker()
    await host.load(one, "a", "b")
    table = host.tables[1]
    with other.using("a"):
        table.add(table.column(total_key("b")), 1)
        host.skip(2)
        with pytest.raises(ModelNotReady, match="in use"):
            await one.load("c", SECONDS)
        table.add(table.column(total_key("b")), -1)
    with pytest.raises(ModelNotReady, match="in use"), one.using("b"):
        await one.load("c", SECONDS)
    host.skip(2)
    await host.load(one, "c")

    assert host.fake.loaded == {"default", "b", "c"}


async def test_request_that_comes_between_keeps_the_model(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model looked unused until it was marked."""
    worker = host.worker()
    await host.load(worker, "a", "b")
    answers = iter([False, True])
    monkeypatch.setattr(worker, "_is_used", lambda _: next(answers, False))
    await host.load(worker, "c")
    assert host.fake.loaded == {"default", "a", "c"}
    assert worker.has("a")


async def test_default_models_and_steps_of_a_loaded_ensemble_stay(host: Host) -> None:
    with pytest.raises(ModelNotReady, match="in use"):
        await host.load(host.worker(limit=1), "a")
    worker = host.worker()
    step = 'ensemble_scheduling { step [{ model_name: "a", model_version: -1 }] }'
    (host.repository / "b" / "config.pbtxt").write_text(step, encoding="utf-8")
    await host.load(worker, "a", "b", "c")
    assert host.fake.loaded == {"default", "a", "c"}


async def test_default_model_that_triton_has_lost_is_loaded_without_a_request(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example that of a route, which the embedded Triton does not know when it starts again."""
    monkeypatch.setattr(on_demand, "_KEEP_SECONDS", 0.02)
    host.fake.index.clear()
    keeping = asyncio.create_task(host.worker().run())
    await eventually(lambda: host.fake.loaded == {"default"})
    keeping.cancel()
    assert host.fake.told == ["load default"]


async def test_loads_run_one_at_a_time_and_workers_take_turns(host: Host) -> None:
    one, other = host.worker(limit=9), host.worker(limit=9)
    host.fake.may_load.clear()
    asking = [asyncio.create_task(one.load(name, SECONDS)) for name in "aabcd"]
    await eventually(lambda: len(host.fake.told) == 1)
    asking.append(asyncio.create_task(other.load("e", SECONDS)))
    await asyncio.sleep(0.1)
    assert len(host.fake.told) == 1
    host.fake.may_load.set()
    await asyncio.gather(*asking)
    await other.load("a", SECONDS)

    assert sorted(host.fake.told) == [f"load {name}" for name in "abcde"]
    assert host.fake.told[-1] != "load e"


async def test_many_loads_are_refused_but_for_another_caller(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "_MAX_LOADS", 2)
    worker = host.worker(limit=9)
    host.fake.may_load.clear()
    asking = [asyncio.create_task(worker.load(name, SECONDS)) for name in "abc"]
    await eventually(lambda: any(task.done() for task in asking))
    asking.append(asyncio.create_task(worker.load("d", SECONDS, Caller("another"))))
    table = host.tables[0]
    await eventually(lambda: asking[-1].done() or table.total(table.column("loads of models")) == 3)
    host.fake.may_load.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(result) for result in results if result] == ["too many models are being loaded"]
    assert "load d" in host.fake.told

    monkeypatch.setattr(on_demand, "_MAX_LOADS", 1)  # all places were given back
    await host.load(worker, "c", "e")


async def test_failed_load_is_not_repeated_at_once_and_takes_no_place(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = host.worker(), host.worker()
    await host.load(one, "a", "b")
    host.fake.load_refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"
    with pytest.raises(TritonUnavailable):
        await one.load("c", SECONDS)
    host.fake.load_refusal = FAILS
    for worker in (one, other):
        with pytest.raises(ModelNotReady, match="could not load"):
            await worker.load("c", SECONDS)
    host.fake.load_refusal = None
    await host.load(other, "d")
    host.skip(6)
    monkeypatch.setattr(on_demand, "_LOAD_SECONDS", 0.5)
    monkeypatch.setattr(on_demand, "_FAILED_TIMES", 1000)  # one that hangs leaves most of the time to others
    host.fake.may_load.clear()
    for _ in range(2):
        with pytest.raises(ModelNotReady, match="could not load"):
            await other.load("c", SECONDS)
        host.skip(6)
    assert host.fake.told == ["load a", "load b", "unload a", "load c", "load c", "load d", "unload b", "load c"]


async def test_model_that_is_being_loaded_takes_a_place(host: Host) -> None:
    """Its worker was killed, or has not waited until the end."""
    worker = host.worker()
    await host.load(worker, "a")
    host.fake.index.append(("e", "1", "LOADING", ""))
    await host.load(worker, "b")
    assert host.fake.told == ["load a", "unload a", "load b"]


async def test_only_models_of_the_repository_are_loaded(host: Host) -> None:
    worker = host.worker()
    (host.repository / "not_pulled").mkdir()
    with worker.using("unknown"):
        await host.load(worker, "not_pulled", "../a", ".", "unknown", "a/1")
    assert host.fake.told == []
    (host.repository / "new" / "1").mkdir(parents=True)
    await host.load(worker, "new")
    assert host.fake.told == ["load new"]


async def test_killed_worker_leaves_no_mark(host: Host) -> None:
    worker = host.worker()
    await host.load(worker, "a")
    killed = WorkerTable()
    killed.set(killed.column("unloading of model a"), -1)
    assert killed.try_lock()
    waiting = asyncio.create_task(worker.load("a", SECONDS))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    killed.close()
    await waiting
    assert worker.has("a")


async def test_closing_stops_waiting(host: Host) -> None:
    worker = host.worker()
    host.fake.may_load.clear()
    waiting = asyncio.create_task(worker.load("a", SECONDS))
    await eventually(lambda: host.fake.told == ["load a"])
    worker.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert host.tables[0].try_lock()
