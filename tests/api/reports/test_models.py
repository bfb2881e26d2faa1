"""The list of models: those that can be used, those that cannot, and those that could be pulled."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from app.main import create_app
from app.zoo import registry
from tests.api.conftest import settings_for
from tests.fakes.triton import CONFIG, FakeTriton, config_with, serving
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
    hints = {"labels": "red,blue", "source": "here", "licence": "MIT"}
    fake.config = {
        **CONFIG,
        "backend": "onnxruntime",
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 64, 3]}],
        "parameters": {name: {"string_value": text} for name, text in hints.items()},
    }
    model = by_name(json(await client.get("/models")))["a"]

    sizes = "version", "versions", "width", "height", "input_shape", "device", "max_batch_size"
    assert [model[name] for name in sizes] == ["1", ["1"], 64, 32, [32, 64, 3], "cpu", 1]
    names = "output_format", "classes", "has_labels", "num_classes", "backend"
    assert [model[name] for name in names] == ["rows of x1 y1 x2 y2 score class", ["red", "blue"], True, 2, "onnxruntime"]
    assert [model[name] for name in ("source", "licence", "detail", "status")] == ["here", "MIT", None, "READY"]


@pytest.mark.parametrize(("config", "default"), [(CONFIG, "10"), (config_with(default_version="2"), "2")])
async def test_versions_of_a_model_are_listed(gateway: Gateway, config: dict[str, Any], default: str) -> None:
    fake, client = gateway
    fake.config = config
    fake.model_versions = ["2", "10"]
    fake.index = [("a", "10", "READY", ""), ("a", "2", "READY", ""), ("a", "11", "UNAVAILABLE", "no weights")]
    fake.index += [("tiny", "10", "READY", "")]
    document = json(await client.get("/models"))
    model = by_name(document)["a"]

    assert (model["version"], model["versions"]) == (default, ["2", "10"])
    assert [card["id"] for card in document["data"]] == ["tiny", "a"]  # the default model comes first


async def test_model_without_an_adapter_says_why(gateway: Gateway) -> None:
    fake, client = gateway
    fake.config = {**CONFIG, "output": []}
    model = by_name(json(await client.get("/models")))["a"]

    assert (model["state"], model["width"]) == ("ready", None)
    assert model["detail"].startswith("the tensors of a match no supported head")


async def test_pulled_model_that_triton_could_not_load_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.load()
    monkeypatch.setattr(registry, "load", lambda: known | {"c": known["yolo11n"]})
    fake = FakeTriton()
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'c' is not found"
    settings = {"model_repository": str(tmp_path), "transport": "inline"}
    async with serving(fake), started(create_app(settings_for(fake.url, **settings))) as client:
        models = by_name(json(await client.get("/models")))
        refused = {name: await client.post(f"/predict/{name}", content=SCENE) for name in ("c", "yolox_nano", "ocr_direction")}

    assert (models["c"]["state"], models["yolox_nano"]["state"]) == ("not_ready", "not_pulled")
    assert "log" in models["c"]["detail"]
    assert json(refused["c"], 503)["code"] == "model_not_ready"
    assert refused["c"].headers["retry-after"]
    assert json(refused["yolox_nano"], 404)["code"] == "unknown_model"
    assert "./just pull yolox_nano" in refused["yolox_nano"].json()["detail"]
    assert models["ocr_direction"]["detail"] == "get it with `nereid pull ocr` or `./just pull ocr`"
    assert refused["ocr_direction"].json()["detail"].endswith("get it with `nereid pull ocr` or `./just pull ocr`")


async def test_model_that_no_triton_can_load_says_why(tmp_path: Path) -> None:
    for name, file in {"a": "config.pbtxt", "b": "config.pbtxt", "exported": "best.onnx"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("input {", encoding="utf-8")
    settings = {"model_repository": str(tmp_path), "transport": "inline"}
    async with serving(fake := FakeTriton()), started(create_app(settings_for(fake.url, **settings))) as client:
        models = by_name(json(await client.get("/models")))

    states = {name: (models[name]["state"], models[name]["status"]) for name in ("a", "b", "exported")}
    assert states == {"a": ("ready", "READY"), "b": ("invalid", "UNAVAILABLE"), "exported": ("no_config", "UNAVAILABLE")}
    assert models["b"]["detail"].startswith(f"{tmp_path}/b/config.pbtxt: ")
    assert f"`nereid add {tmp_path}/exported`" in models["exported"]["detail"]


async def test_without_triton_there_is_no_list(lonely: httpx.AsyncClient, gateway: Gateway) -> None:
    fake, client = gateway
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    for one in (lonely, client):
        response = await one.get("/models")
        assert json(response, 503)["code"] == "triton_unavailable"
        assert response.headers["retry-after"] == "1"
