"""Models at a Triton: their specs, which are read again without a wait, and which are loaded at their first request."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import msgspec
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownVersion, UnsupportedModel
from app.resilience.model_queue import total_key
from app.resilience.worker_table import WorkerTable
from app.triton import on_demand
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.specs import Completion, SpecCache
from app.triton.transport import Transport
from tests.fakes.triton import CONFIG, DOWN, GONE, NOT_LOADED, SPEC, FakeTriton, LoadingTriton, Refusal, config_with, serving
from tests.support import Clock, OpenTable, eventually

Fake = tuple[FakeTriton, TritonClient]
Error = type[GatewayError]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.specs")


@pytest.fixture
def cache(fake_triton: Fake) -> SpecCache:
    return SpecCache(fake_triton[1])


async def refreshed(cache: SpecCache) -> None:
    await eventually(lambda: not cache._refreshing)  # noqa: SLF001 - other tests' caches have such tasks, too


@pytest.mark.parametrize(
    ("default", "references"),
    [("", ["tiny", "tiny:2", "tiny:10"]), ("2", ["tiny:2", "tiny:2", "tiny:10"])],
    ids=["newest", "named"],
)
async def test_each_version_has_its_own_spec(fake_triton: Fake, cache: SpecCache, default: str, references: list[str]) -> None:
    """The default version is the newest one, or that which the config names. Many requests read each once."""
    fake, _ = fake_triton
    fake.model_versions = ["2", "10", "9", "dev"]
    fake.config = config_with(default_version=default) if default else CONFIG
    models = ["tiny", "tiny:2", "tiny:10"]
    specs = [(await asyncio.gather(*(cache.get(model) for _ in range(20))))[-1] for model in models]

    assert [spec.reference for spec in specs] == references
    assert [spec.version for spec in specs] == [default or "10", "2", "10"]
    assert fake.config_reads == len(set(references)) + bool(default)
    cache.forget("tiny:2")
    assert [cache.has(model) for model in models] == [not default, False, True]
    fake.model_versions = ["10", "9"]
    with pytest.raises(UnknownVersion, match=r"^tiny has no version 2; versions that can be used: 9, 10$"):
        await cache.get("tiny:2")


async def test_spec_is_read_again_after_a_while_and_no_request_waits(fake_triton: Fake, cache: SpecCache, clock: Clock) -> None:
    fake, _ = fake_triton
    first = await cache.get("tiny")
    for seconds, reads in ((5, 1), (1, 2)):
        clock.now += seconds
        assert cache.cached("tiny") is first
        await refreshed(cache)
        assert fake.config_reads == reads
    assert cache.cached("tiny") is first  # only images with the same spec object share a batch
    fake.model_versions = ["2"]
    for refusal in (DOWN, (grpc.StatusCode.DEADLINE_EXCEEDED, "")):
        fake.query_refusal = refusal
        clock.now += 6
        assert await cache.get("tiny") is first
        await refreshed(cache)
        assert await cache.get("tiny") is first
    fake.query_refusal = None
    fake.may_tell.clear()
    clock.now += 6
    assert all([await cache.get("tiny") is first for _ in range(20)])
    await eventually(lambda: fake.config_reads == 5)
    assert all([await cache.get("tiny") is first for _ in range(20)])
    fake.may_tell.set()
    await refreshed(cache)

    assert (await cache.get("tiny")).version == "2"
    assert fake.config_reads == 5


@pytest.mark.parametrize(
    ("config", "refusal", "expected", "detail"),
    [
        (CONFIG, GONE, ModelNotReady, "not loaded any more"),
        (CONFIG, NOT_LOADED, ModelNotReady, "the model is not loaded"),
        ({**CONFIG, "output": []}, None, UnsupportedModel, "the tensors of tiny match no supported head"),
    ],
)
async def test_model_that_has_gone_is_forgotten_by_the_refresh(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake, cache: SpecCache, clock: Clock, config: dict[str, Any], refusal: Refusal | None, expected: Error, detail: str
) -> None:
    """No exception is left unretrieved, which the event loop would report."""
    fake, _ = fake_triton
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    first = await cache.get("tiny")
    fake.config, fake.query_refusal = config, refusal
    clock.now += 61
    assert await cache.get("tiny") is first
    await refreshed(cache)
    with pytest.raises(expected, match=detail):
        await cache.get("tiny")
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)
    assert reports == []
    fake.config, fake.query_refusal = CONFIG, None
    clock.now += 1
    assert (await cache.get("tiny")).name == "tiny"


async def test_unit_of_boxes_is_not_guessed_and_is_kept_if_it_cannot_be_asked_again(fake_triton: Fake) -> None:
    decided, down = msgspec.structs.replace(SPEC, box_units="normalized"), TritonUnavailable("")
    cache = SpecCache(fake_triton[1], Completion(lambda config: config, AsyncMock(side_effect=[down, decided, down])))
    with pytest.raises(TritonUnavailable):
        await cache.get("tiny")
    for _ in range(2):
        assert (await cache.read("tiny")).box_units == "normalized"
        fake_triton[1].connection += 1


@pytest.mark.parametrize("is_square", [False, True])
async def test_settings_can_want_squares_alone(fake_triton: Fake, is_square: bool) -> None:  # noqa: FBT001
    fake_triton[0].config = config_with(shapes="64x32", box_units="pixels") | {
        "input": [{**CONFIG["input"][0], "dims": [-1, -1, 3]}]
    }
    cache = SpecCache(fake_triton[1], Completion(lambda config: config, AsyncMock(), is_square))

    assert (await cache.get("tiny")).shapes == (() if is_square else ((64, 32),))


SECONDS = 30.0


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


async def test_least_recently_used_model_leaves(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers notice that. A caller may load one model at a time here."""
    monkeypatch.setattr(on_demand, "_MAX_LOADS", 1)
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
    host.fake.load_refusal = grpc.StatusCode.INTERNAL, "load failed"
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
