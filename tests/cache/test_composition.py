"""A worker whose Tritons load the models of a repository caches what they find once they have loaded the files that are there."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from app.cache import fingerprints
from app.main import create_app
from app.triton import loading, on_demand
from app.triton.repository import CLEARED, DESCRIPTION, LOCK
from app.zoo import description
from tests.api.conftest import settings_for
from tests.fakes.triton import FakeTriton, LoadingTriton, infer_response, serving
from tests.support import SCENE, started, until
from tests.zoo.test_fingerprint import DOORS


async def until_cache(client: httpx.AsyncClient, expected: str | None, model: str = "tiny") -> None:
    """Wait until the cache answers so."""

    async def answers() -> bool:
        response = await client.post("/detect", params={"model": model}, content=SCENE)
        return bool(response.headers.get("x-cache") == expected)

    await until(answers)


async def test_changes_are_cached_once_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(fingerprints, "_INTERVAL_SECONDS", 0.01)
    network = tmp_path / "tiny" / "1" / "model.onnx"
    network.parent.mkdir(parents=True)
    network.write_bytes(b"one")
    (tmp_path / "tiny" / DESCRIPTION).write_text(description.dump(DOORS), encoding="utf-8")
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    given = {"cache": "memory", "triton_loads_models": True, "model_repository": str(tmp_path)}
    async with serving(fake), started(create_app(settings_for(fake.url, **given))) as client:
        await until_cache(client, None)
        (tmp_path / LOCK).touch()
        await until_cache(client, "hit")
        network.write_bytes(b"two")
        await until_cache(client, None)
        (tmp_path / LOCK).touch()
        for result in ("miss", "hit"):
            await until_cache(client, result)
        (tmp_path / CLEARED).touch()
        for result in ("miss", "hit"):
            await until_cache(client, result)


async def test_a_model_is_cached_again_whenever_it_was_loaded_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(fingerprints, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(on_demand, "_STAY_NS", 0)
    for model in ("tiny", "doors", "gates"):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.onnx").write_bytes(b"one")
        (tmp_path / model / DESCRIPTION).write_text(description.dump(DOORS), encoding="utf-8")
    (tmp_path / LOCK).touch()
    fake = LoadingTriton()
    fake.index = [("tiny", "1", "READY", "")]
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    given = {"cache": "memory", "triton_loads_models": True, "model_repository": str(tmp_path), "loaded_models": 2}
    async with serving(fake), started(create_app(settings_for(fake.url, **given))) as client:
        for model in ("doors", "gates", "doors"):
            await until_cache(client, "hit", model)
            assert fake.loaded == {"tiny", model}
