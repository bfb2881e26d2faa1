"""Each Triton loads the models that are added to a repository which it shares; a failure is told once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from app.triton import loading
from app.triton.loading import ModelLoader, has_loaded
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.repository import DESCRIPTION, LOCK, REMOVED, identify, removed_models
from tests.support import TABLE, captured_log, eventually
from tests.triton.conftest import Two

FAILS = grpc.StatusCode.UNAVAILABLE, "it is being stopped"


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
    loader.fakes[0].load_refusal = FAILS
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
    loader.fakes[0].load_refusal = FAILS
    put(tmp_path, "doors", "gates")
    await all_told(loader, "load doors", "load gates")
    await asyncio.sleep(0.1)
    assert (loaded("doors"), loaded("gates")) == (False, False)
    loader.fakes[0].load_refusal = None
    put(tmp_path, "doors", "gates")
    await eventually(lambda: loaded("doors") and loaded("gates"))

    assert not loaded("doors", TritonPool(loader.pool.transport, loader.servers[:1]))


async def test_models_on_demand_are_only_loaded_again(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that any Triton has loaded may have changed, or this one was started anew; a default one may have been added."""
    two.fakes[1].index = []
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    put(tmp_path, "a", "b", "doors", "gates")
    models = ModelsOnDemand(two.pool, TABLE, tmp_path, 9, lambda: {"doors"})
    task = asyncio.create_task(ModelLoader(two.pool, tmp_path, models).run(TABLE))
    await eventually(lambda: all(fake.told == ["load a", "load doors"] for fake in two.fakes))
    two.fakes[0].query_refusal = two.fakes[1].query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    put(tmp_path, "a", "doors")
    await eventually(lambda: all(fake.told[2:] == ["unload b", "unload gates", "load doors"] for fake in two.fakes))
    task.cancel()
