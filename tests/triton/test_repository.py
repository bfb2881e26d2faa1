"""Models of a repository: which can be loaded, which are loaded once they are added, and which at their first request."""

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
from app.triton.config_file import unloadable_models
from app.triton.loading import ModelLoader, has_loaded
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.repository import DESCRIPTION, LOCK, REMOVED, identify, loadable_models, removed_models
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


async def test_all_workers_know_which_files_all_tritons_have_loaded(loader: Two, tmp_path: Path) -> None:
    def loaded(model: str, pool: TritonPool = loader.pool) -> bool:
        return has_loaded(TABLE, pool, model, identify(tmp_path / model))

    put(tmp_path, "doors")
    assert not loaded("doors")
    await eventually(lambda: loaded("doors"))
    (tmp_path / "doors" / DESCRIPTION).write_text("changed", encoding="utf-8")
    assert not loaded("doors")
    loader.fakes[0].load_refusal = STOPPING
    put(tmp_path, "doors", "gates")
    await all_told(loader, "load doors", "load gates")
    await asyncio.sleep(0.1)
    assert (loaded("doors"), loaded("gates")) == (False, False)
    loader.fakes[0].load_refusal = None
    put(tmp_path, "doors", "gates")
    await eventually(lambda: loaded("doors") and loaded("gates"))

    assert not loaded("doors", TritonPool(loader.pool.transport, loader.servers[:1]))


def write(folder: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(("is_embedded", "invalid"), [(True, ["broken", "own"]), (False, ["broken"])])
def test_models_that_no_triton_can_load_are_named(tmp_path: Path, *, is_embedded: bool, invalid: list[str]) -> None:
    files = {"sound/config.pbtxt": "", "broken/config.pbtxt": "input {", "own/configs/embedded.pbtxt": "input {"}
    networks = "sound/1/model.onnx", "exported/best.onnx", "version/1/model.onnx", ".add-unfinished/model.onnx", "file.onnx"
    write(tmp_path, files | dict.fromkeys((*networks, "own/config.pbtxt", "nothing/notes.txt"), ""))
    found = unloadable_models(tmp_path, is_embedded=is_embedded)

    states = dict.fromkeys(invalid, "invalid") | dict.fromkeys(("exported", "version"), "no_config")
    assert {name: one.state for name, one in found.items()} == states
    for name, (_, reason) in found.items():
        assert reason.startswith(f"{tmp_path}/{name}")
        assert (f"`nereid add {tmp_path}/{name}`" in reason) is (name == "exported")
        assert "\n" not in reason
    assert unloadable_models(tmp_path / "nowhere", is_embedded=is_embedded) == {}


def test_models_with_a_config_and_a_version_are_loadable(tmp_path: Path) -> None:
    files = """
        both/config.pbtxt both/configs/embedded.pbtxt both/1/model.onnx elsewhere/config.pbtxt elsewhere/2/model.py
        embedded/configs/embedded.pbtxt embedded/10/model.onnx comments/config.pbtxt comments/1/model.py no_folder
        no_version/config.pbtxt no_config/1/model.onnx no_number/config.pbtxt no_number/latest/model.onnx
    """
    write(tmp_path, dict.fromkeys(files.split(), '# of a test\nname: "m"'))
    write(tmp_path, {"comments/configs/embedded.pbtxt": "# for another\n\n  # Triton\n"})
    (tmp_path / "no_version" / "1").mkdir()

    assert loadable_models(tmp_path) == ["both", "elsewhere", "embedded"]
    assert loadable_models(tmp_path / "nowhere") == []
