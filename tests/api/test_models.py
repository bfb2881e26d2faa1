"""The list of models; and models that are loaded for the requests that name them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.main import create_app
from tests.api.conftest import settings_for
from tests.fakes.triton import CONFIG, FakeTriton, LoadingTriton, config_with, infer_response, serving
from tests.support import SCENE, json, started

Gateway = tuple[FakeTriton, httpx.AsyncClient]


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    return {model["name"]: model for model in document["models"]}


async def test_models_of_triton_are_listed_with_their_state(gateway: Gateway) -> None:
    _, client = gateway
    document = json(await client.get("/models"))
    names = [model["name"] for model in document["models"]]
    listed = by_name(document)

    assert names == sorted(names)
    assert (document["default"], document["total"], document["triton_status"]) == ("tiny", len(names), "READY")
    states = {name: model["state"] for name, model in listed.items()}
    assert {"a": "ready", "b": "not_ready", "c": "not_ready", "yolo11n": "not_pulled"}.items() <= states.items()
    assert len({tuple(model) for model in document["models"]}) == 1  # all have the same members
    assert (listed["yolo11n"]["status"], listed["yolo11n"]["versions"]) == ("UNAVAILABLE", [])
    assert document == json(await client.get("/models/"))
    assert document.items() <= json(await client.get("/v1/models")).items()  # where a dialect may add to it
    for name in ("a", "b", "yolo11n"):
        assert json(await client.get(f"/models/{name}")) == listed[name]
    problem = json(await client.get("/models/nothing"), 404)
    assert problem["detail"] == "there is no model 'nothing'; GET /models lists those that exist"


async def test_ready_model_is_described_by_its_config(gateway: Gateway) -> None:
    fake, client = gateway
    fake.config = {
        **CONFIG,
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 64, 3]}],
        "parameters": {"labels": {"string_value": "red,blue"}, "licence": {"string_value": "MIT"}},
    }
    model = json(await client.get("/models/a"))

    assert [model[name] for name in ("version", "width", "height", "device", "max_batch_size")] == ["1", 64, 32, "cpu", 1]
    assert [model[name] for name in ("output_format", "licence")] == ["rows of x1 y1 x2 y2 score class", "MIT"]
    assert [model[name] for name in ("classes", "has_labels", "num_classes")] == [["red", "blue"], True, 2]


async def test_versions_of_a_model_are_listed(gateway: Gateway) -> None:
    fake, client = gateway
    fake.config = config_with(default_version="2")
    fake.model_versions = ["2", "10"]
    fake.index = [("a", "10", "READY", ""), ("a", "2", "READY", ""), ("a", "11", "UNAVAILABLE", "no weights")]
    fake.index += [("tiny", "10", "READY", "")]
    document = json(await client.get("/models"))
    model = by_name(document)["a"]

    assert (model["version"], model["versions"]) == ("2", ["2", "10"])
    assert [card["id"] for card in document["data"]] == ["tiny", "a"]  # the default model comes first


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[tuple[LoadingTriton, httpx.AsyncClient]]:
    for name in ("tiny", "doors"):
        (tmp_path / name / "1").mkdir(parents=True)
    fake = LoadingTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    unloaded = [("doors", "1", "UNAVAILABLE", "unloaded"), ("gates", "1", "UNAVAILABLE", "no weights")]
    fake.index = [("tiny", "1", "READY", ""), *unloaded]
    given = {"model_repository": str(tmp_path), "triton_loads_models": True, "loaded_models": 3}
    async with serving(fake), started(create_app(settings_for(fake.url, **given))) as client:
        yield fake, client


async def test_model_is_loaded_by_its_first_request_if_there_is_time_and_again_once_it_was_unloaded(
    loading: tuple[LoadingTriton, httpx.AsyncClient],
) -> None:
    fake, client = loading
    assert json(await client.post("/predict/windows", content=SCENE), 404)["code"] == "unknown_model"
    assert fake.told == []
    states = {model["name"]: model["state"] for model in json(await client.get("/models"))["models"]}
    assert {"tiny": "ready", "doors": "not_loaded", "gates": "not_ready"}.items() <= states.items()
    fake.may_load.clear()
    refused = await client.post("/predict/doors?timeout_ms=100", content=SCENE)
    assert (json(refused, 503)["code"], "retry-after" in refused.headers) == ("model_not_ready", True)
    fake.may_load.set()
    for loads in (1, 1, 2):
        if loads == 2:
            fake.index = [entry for entry in fake.index if entry[0] != "doors"]
        assert (await client.post("/detect/batch?model=doors", files=[("file", SCENE)])).status_code == 200
        assert fake.told == ["load doors"] * loads
