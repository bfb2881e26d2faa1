"""Models that Triton has not loaded are loaded for the requests that name them, through the API as a whole."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import numpy as np
import pytest

from app.main import create_app
from app.triton.on_demand import ModelsOnDemand
from tests.api.conftest import settings_for
from tests.fakes.triton import LoadingTriton, infer_response, serving
from tests.support import SCENE, json, started

Gateway = tuple[LoadingTriton, httpx.AsyncClient]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    for name in ("tiny", "doors"):
        (tmp_path / name / "1").mkdir(parents=True)
    (file := tmp_path / "routes.toml").write_text('[detector]\nto = "tiny"\ncanary = {to = "doors", share = 1.0}\n')
    fake = LoadingTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    unloaded = [("doors", "1", "UNAVAILABLE", "unloaded"), ("gates", "1", "UNAVAILABLE", "no weights")]
    fake.index = [("tiny", "1", "READY", ""), *unloaded]
    given = {"model_repository": str(tmp_path), "routes_file": str(file), "triton_loads_models": True, "loaded_models": 3}
    async with serving(fake), started(create_app(settings_for(fake.url, **given))) as client:
        yield fake, client


@pytest.mark.parametrize("path", ["/predict/doors", "/detect?model=doors", "/detect/batch?model=doors"])
async def test_model_is_loaded_by_its_first_request_and_again_once_it_was_unloaded(gateway: Gateway, path: str) -> None:
    fake, client = gateway
    files = [("file", SCENE)] if "batch" in path else None
    for loads in (1, 1, 2):
        if loads == 2:
            fake.index = [entry for entry in fake.index if entry[0] != "doors"]
        assert (await client.post(path, files=files, content=None if files else SCENE)).status_code == 200
        assert fake.told == ["load doors"] * loads


async def test_request_without_enough_time_is_told_to_come_again_and_for_an_unknown_model_nothing_is_loaded(
    gateway: Gateway,
) -> None:
    fake, client = gateway
    assert json(await client.post("/predict/windows", content=SCENE), 404)["code"] == "unknown_model"
    assert fake.told == []
    states = {model["name"]: model["state"] for model in json(await client.get("/models"))["models"]}
    assert {"tiny": "ready", "doors": "not_loaded", "gates": "not_ready"}.items() <= states.items()
    fake.may_load.clear()
    refused = await client.post("/predict/doors?timeout_ms=100", content=SCENE)
    assert json(refused, 503)["code"] == "model_not_ready"
    assert refused.headers["retry-after"]
    fake.may_load.set()
    assert (await client.post("/predict/doors", content=SCENE)).status_code == 200
    assert fake.told == ["load doors"]


async def test_batch_keeps_the_model_of_a_canary_loaded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    using = ModelsOnDemand.using

    def record(models: ModelsOnDemand, name: str) -> AbstractContextManager[None]:
        used.append(name)
        return using(models, name)

    monkeypatch.setattr(ModelsOnDemand, "using", record)
    assert (await gateway[1].post("/detect/batch?model=detector", files=[("file", SCENE)])).status_code == 200
    assert "doors" in used
