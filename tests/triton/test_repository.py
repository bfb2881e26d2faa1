"""Models of a repository: which are loaded once they are added, and which at their first request."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from app.errors import ModelNotReady, TritonUnavailable
from app.resilience.model_queue import total_key
from app.resilience.worker_table import WorkerTable
from app.triton import loading, on_demand
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.loading import ModelLoader
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.repository import DESCRIPTION, LOCK, REMOVED, removed_models
from app.triton.transport import Transport
from tests.fakes.triton import LoadingTriton, serving
from tests.support import TABLE, OpenTable, captured_log, eventually
from tests.triton.conftest import Two

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


async def test_default_models_and_steps_of_a_loaded_ensemble_stay(host: Host) -> None:
    with pytest.raises(ModelNotReady, match="in use"):
        await host.load(host.worker(limit=1), "a")
    worker = host.worker()
    step = 'ensemble_scheduling { step [{ model_name: "a", model_version: -1 }] }'
    (host.repository / "b" / "config.pbtxt").write_text(step, encoding="utf-8")
    await host.load(worker, "a", "b", "c")
    assert host.fake.loaded == {"default", "a", "c"}


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


STOPPING = grpc.StatusCode.UNAVAILABLE, "it is being stopped"


@pytest.fixture
async def loader(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    """Two Tritons, which a worker tells to load the models in a folder."""
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    task = asyncio.create_task(ModelLoader(two.pool, tmp_path).run(TABLE))
    yield two
    task.cancel()


def put(repository: Path, *models: str) -> None:
    gone = {path.parent.name for path in repository.glob(f"*/{DESCRIPTION}")} - {*models}
    for model in gone:
        (repository / model / DESCRIPTION).unlink()
    (repository / REMOVED).write_text("\n".join({*removed_models(repository), *gone}), encoding="utf-8")
    for model in models:
        (repository / model).mkdir(exist_ok=True)
        (repository / model / DESCRIPTION).touch()
    (repository / LOCK).touch()


async def all_told(two: Two, *told: str) -> None:
    await eventually(lambda: all(fake.told[-len(told) :] == [*told] for fake in two.fakes))


async def test_models_are_loaded_and_unloaded_and_a_failure_is_told_once(
    loader: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, loading)
    loader.fakes[0].load_refusal = STOPPING
    put(tmp_path, "doors", "gates")
    await all_told(loader, "load doors", "load gates")
    count = len(loader.fakes[0].told)
    await asyncio.sleep(0.1)
    assert len(loader.fakes[0].told) == count
    assert [(line.kwargs["triton"], line.kwargs["model"]) for line in log] == [
        (loader.fakes[0].url, "doors"),
        (loader.fakes[0].url, "gates"),
    ]
    put(tmp_path, "gates")
    await all_told(loader, "unload doors", "load gates")
    await asyncio.to_thread(tmp_path.rename, tmp_path.with_name("unmounted"))  # it cannot be read, which changes nothing
    await asyncio.sleep(0.1)
    await all_told(loader, "unload doors", "load gates")
