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
from tests.fakes.triton import FakeTriton
from tests.support import TABLE, captured_log, eventually
from tests.triton.conftest import Two


@pytest.fixture
async def tritons(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[FakeTriton]]:
    """Two Tritons, which a worker tells to load the models in a folder."""
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    task = asyncio.create_task(ModelLoader(two.pool, tmp_path).run(TABLE))
    yield two.fakes
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


async def test_models_are_loaded_and_unloaded(tritons: list[FakeTriton], tmp_path: Path) -> None:
    put(tmp_path, "doors", "gates")
    await eventually(lambda: all(fake.told[-2:] == ["load doors", "load gates"] for fake in tritons))
    put(tmp_path, "gates")
    await eventually(lambda: all(fake.told[-2:] == ["unload doors", "load gates"] for fake in tritons))


async def test_failure_is_told_once_and_the_others_are_loaded(
    tritons: list[FakeTriton], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, loading)
    tritons[0].load_refusal = grpc.StatusCode.UNAVAILABLE, "it is being stopped"
    put(tmp_path, "doors", "gates")
    await eventually(lambda: all(fake.told[-2:] == ["load doors", "load gates"] for fake in tritons))
    count = len(tritons[0].told)
    await asyncio.sleep(0.1)
    assert len(tritons[0].told) == count
    assert {(line.kwargs["triton"], line.kwargs["model"]) for line in log} == {(tritons[0].url, "doors"), (tritons[0].url, "gates")}
    put(tmp_path, "gates")

    await eventually(lambda: tritons[0].told[-2:] == ["unload doors", "load gates"])


async def test_all_workers_know_which_files_all_tritons_have_loaded(tritons: list[FakeTriton], two: Two, tmp_path: Path) -> None:
    def loaded(model: str, pool: TritonPool = two.pool) -> bool:
        return has_loaded(TABLE, pool, model, identify(tmp_path / model))

    put(tmp_path, "doors")
    assert not loaded("doors")
    await eventually(lambda: loaded("doors"))
    (tmp_path / "doors" / DESCRIPTION).write_text("changed", encoding="utf-8")
    assert not loaded("doors")
    tritons[0].load_refusal = grpc.StatusCode.UNAVAILABLE, "it is being stopped"
    put(tmp_path, "doors", "gates")
    await eventually(lambda: tritons[1].told[-1:] == ["load gates"])
    await asyncio.sleep(0.1)
    assert (loaded("doors"), loaded("gates")) == (False, False)
    tritons[0].load_refusal = None
    put(tmp_path, "doors", "gates")
    await eventually(lambda: loaded("doors") and loaded("gates"))

    assert not loaded("doors", TritonPool(two.pool.transport, two.pool.servers[:1]))


async def test_repository_that_cannot_be_read_changes_nothing(tritons: list[FakeTriton], tmp_path: Path) -> None:
    put(tmp_path, "doors")
    await eventually(lambda: all(fake.told[-1:] == ["load doors"] for fake in tritons))
    await asyncio.to_thread(tmp_path.rename, tmp_path.with_name("unmounted"))
    await asyncio.sleep(0.1)

    assert all(fake.told[-1:] == ["load doors"] for fake in tritons)


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
