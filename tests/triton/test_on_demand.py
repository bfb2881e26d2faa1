"""Models are loaded at their first request; the least recently used one leaves, never one that is used or a default one."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from threading import Event

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
from app.triton.status import NotLoadedYet
from app.triton.transport import Transport
from tests.fakes.triton import LoadingTriton, serving
from tests.support import OpenTable, eventually

SECONDS = 30.0


class Clock:
    """The clock of last uses, which is ahead of the real one."""

    ahead = 10**10

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead

    def skip(self, seconds: float) -> None:
        self.ahead += int(seconds * 1e9)


class Host:
    """Workers of a host, with one Triton and the models `default` and `a` to `e`, of which three may be loaded."""

    def __init__(self, fake: LoadingTriton, repository: Path, open_table: OpenTable) -> None:
        self.fake = fake
        self.tables: list[WorkerTable] = []
        self.pools: list[TritonPool] = []
        self.repository = repository
        self._open_table = open_table
        for name in ("default", *"abcde"):
            (repository / name / "1").mkdir(parents=True)

    def worker(self, limit: int = 3) -> ModelsOnDemand:
        table = self._open_table()
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(self.fake.url), table)])
        self.tables.append(table)
        self.pools.append(pool)
        return ModelsOnDemand(pool, table, self.repository, limit, lambda: {"default"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(on_demand, "monotonic_ns", clock)
    monkeypatch.setattr(on_demand, "_ROOM_SECONDS", 0.2)
    return clock


@pytest.fixture
async def host(tmp_path: Path, open_table: OpenTable) -> AsyncIterator[Host]:
    fake = LoadingTriton()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(fake))
        host = Host(fake, tmp_path, open_table)
        yield host
        for pool in host.pools:
            await pool.close()


async def load(worker: ModelsOnDemand, clock: Clock, *names: str) -> None:
    """Load models, one after the other, each a while after the one before was used."""
    for name in names:
        await worker.load(name, SECONDS)
        clock.skip(2)


async def test_the_least_recently_used_leaves(host: Host, clock: Clock) -> None:
    worker = host.worker()
    await load(worker, clock, "default", "a", "b")
    with worker.using("a"):
        pass
    clock.skip(2)
    await load(worker, clock, "c")
    assert host.fake.loaded == {"default", "a", "c"}
    assert [worker.has(name) for name in "abc"] == [True, False, True]
    await load(worker, clock, "b")

    assert host.fake.loaded == {"default", "b", "c"}
    assert host.fake.told == ["load a", "load b", "unload b", "load c", "unload a", "load b"]


async def test_a_model_in_use_stays(host: Host, clock: Clock) -> None:
    one, other = host.worker(), host.worker()
    await load(one, clock, "a", "b")
    table = host.tables[1]
    with other.using("a"):
        table.add(table.column(total_key("b")), 1)
        clock.skip(2)
        with pytest.raises(ModelNotReady, match="in use"):
            await one.load("c", SECONDS)
        table.add(table.column(total_key("b")), -1)
    with pytest.raises(ModelNotReady, match="in use"), one.using("b"):
        await one.load("c", SECONDS)
    clock.skip(2)
    await load(one, clock, "c")

    assert host.fake.loaded == {"default", "b", "c"}


async def test_a_request_that_comes_between_keeps_the_model(host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model looked unused until it was marked."""
    worker = host.worker()
    await load(worker, clock, "a", "b")
    answers = iter([False, True])
    monkeypatch.setattr(worker, "_is_used", lambda _: next(answers, False))
    await load(worker, clock, "c")
    assert host.fake.loaded == {"default", "a", "c"}
    assert worker.has("a")


async def test_default_models_stay(host: Host, clock: Clock) -> None:
    worker = host.worker(limit=1)
    with pytest.raises(ModelNotReady, match="in use"):
        await load(worker, clock, "a")
    assert host.fake.told == []


async def test_steps_of_a_loaded_ensemble_stay(host: Host, clock: Clock) -> None:
    worker = host.worker()
    step = 'ensemble_scheduling { step [{ model_name: "a", model_version: -1 }] }'
    (host.repository / "b" / "config.pbtxt").write_text(step, encoding="utf-8")
    await load(worker, clock, "a", "b")
    await load(worker, clock, "c")
    assert host.fake.loaded == {"default", "a", "c"}


async def test_loads_run_one_at_a_time_however_many_requests_need_them(host: Host) -> None:
    one, other = host.worker(), host.worker()
    host.fake.may_load.clear()
    asking = [asyncio.create_task(worker.load("a", SECONDS)) for worker in (one, one, other)]
    asking.append(asyncio.create_task(other.load("b", SECONDS)))
    await eventually(lambda: len(host.fake.told) == 1)
    await asyncio.sleep(0.1)
    assert len(host.fake.told) == 1
    host.fake.may_load.set()
    await asyncio.gather(*asking)

    assert sorted(host.fake.told) == ["load a", "load b"]


async def test_many_loads_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_finished_load_leaves_its_place_to_another(host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "_MAX_LOADS", 1)
    await load(host.worker(), clock, "a", "b")

    assert host.fake.told == ["load a", "load b"]


async def test_a_load_goes_on_after_the_deadline(host: Host) -> None:
    worker = host.worker()
    host.fake.may_load.clear()
    with pytest.raises(ModelNotReady, match="is being loaded") as error:
        await worker.load("a", 0.05)
    assert error.value.retry_after_seconds
    host.fake.may_load.set()
    await worker.load("a", SECONDS)
    assert host.fake.told == ["load a"]


async def test_a_failed_load_is_not_repeated_at_once(host: Host, clock: Clock) -> None:
    one, other = host.worker(), host.worker()
    host.fake.load_refusal = grpc.StatusCode.INTERNAL, "load failed for model 'a'"
    for worker in (one, other):
        with pytest.raises(ModelNotReady, match="could not load"):
            await worker.load("a", SECONDS)
    assert host.fake.told == ["load a"]
    host.fake.load_refusal = None
    clock.skip(6)
    await load(other, clock, "a")
    assert host.fake.loaded == {"default", "a"}


async def test_a_load_that_hangs_leaves_most_of_the_time_to_others(
    host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_LOAD_SECONDS", 0.1)
    monkeypatch.setattr(on_demand, "_FAILED_TIMES", 1000)
    worker = host.worker()
    host.fake.may_load.clear()
    for _ in range(2):
        with pytest.raises(ModelNotReady, match="could not load"):
            await worker.load("a", SECONDS)
        clock.skip(6)
    assert host.fake.told == ["load a"]
    host.fake.may_load.set()
    await load(worker, clock, "b")
    clock.skip(1000)
    await load(worker, clock, "a")
    assert host.fake.told == ["load a", "load b", "load a"]


async def test_workers_take_turns(host: Host) -> None:
    one, other = host.worker(limit=9), host.worker(limit=9)
    host.fake.may_load.clear()
    asking = [asyncio.create_task(one.load(name, SECONDS)) for name in "abcd"]
    await eventually(lambda: len(host.fake.told) == 1)
    asking.append(asyncio.create_task(other.load("e", SECONDS)))
    await asyncio.sleep(0.1)
    host.fake.may_load.set()
    await asyncio.gather(*asking)
    assert host.fake.told[-1] != "load e"


async def test_a_model_that_is_being_loaded_takes_a_place(host: Host, clock: Clock) -> None:
    """Its worker was killed, or has not waited until the end."""
    worker = host.worker()
    await load(worker, clock, "a")
    host.fake.index.append(("e", "1", "LOADING", ""))
    await load(worker, clock, "b")
    assert host.fake.told == ["load a", "unload a", "load b"]


async def test_a_default_model_that_triton_has_lost_is_loaded_without_a_request(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example that of a route, which the embedded Triton does not know when it starts again."""
    monkeypatch.setattr(on_demand, "_KEEP_SECONDS", 0.02)
    worker = host.worker()
    host.fake.index.clear()
    keeping = asyncio.create_task(worker.run())
    await eventually(lambda: host.fake.loaded == {"default"})
    keeping.cancel()
    assert host.fake.told == ["load default"]


async def test_a_repository_that_does_not_answer_takes_no_more_than_the_time(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, is_read = host.worker(), Event()
    readings = Counter[str]()

    def read() -> None:
        readings["read"] += 1
        is_read.wait()

    monkeypatch.setattr(worker, "_read", read)
    try:
        for name in ("b", "invented"):
            with suppress(NotLoadedYet):
                await worker.load(name, 0.01)
        assert readings.total() == 1  # one thread for all requests
    finally:
        is_read.set()


async def test_a_failed_load_takes_no_further_place(host: Host, clock: Clock) -> None:
    worker = host.worker()
    await load(worker, clock, "a", "b")
    host.fake.load_refusal = grpc.StatusCode.INTERNAL, "load failed for model 'c'"
    for _ in range(2):
        with pytest.raises(ModelNotReady, match="could not load"):
            await worker.load("c", SECONDS)
    host.fake.load_refusal = None
    await load(worker, clock, "d")

    assert host.fake.told == ["load a", "load b", "unload a", "load c", "load d"]


async def test_unavailable_triton_is_asked_again(host: Host, clock: Clock) -> None:
    worker = host.worker()
    host.fake.load_refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"
    with pytest.raises(TritonUnavailable):
        await worker.load("a", SECONDS)
    host.fake.load_refusal = None
    await load(worker, clock, "a")
    assert host.fake.loaded == {"default", "a"}


async def test_only_models_of_the_repository_are_loaded(host: Host, clock: Clock) -> None:
    worker = host.worker()
    (host.repository / "not_pulled").mkdir()
    with worker.using("unknown"):
        await load(worker, clock, "not_pulled", "../a", ".", "unknown", "a/1")
    assert host.fake.told == []
    (host.repository / "new" / "1").mkdir(parents=True)
    await load(worker, clock, "new")
    assert host.fake.told == ["load new"]


async def test_another_worker_notices_that_a_model_was_unloaded(host: Host, clock: Clock) -> None:
    one, other = host.worker(), host.worker()
    await load(one, clock, "a", "b")
    await load(other, clock, "a")
    assert other.has("a")
    await load(one, clock, "c", "d")
    assert not other.has("a")
    await load(other, clock, "a")
    assert other.has("a")


async def test_a_killed_worker_leaves_no_mark(host: Host, clock: Clock) -> None:
    worker = host.worker()
    await load(worker, clock, "a")
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
    host.fake.may_load.set()
