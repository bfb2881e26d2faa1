"""The list of models, those that are loaded for the requests that name them, and how callers with the scope `admin` change them."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import grpc
import httpx
import numpy as np
import onnx
import pytest

from app.api import admin
from app.api.application import Application
from app.host import program
from app.main import create_app
from app.pipeline import completion
from app.triton.repository import LOCK, REMOVED
from app.zoo import description
from app.zoo.repository import Repository
from tests.api.conftest import ADMIN, CAMERA, Gateway, client_for, settings_for, write_keys
from tests.fakes.triton import CONFIG, FakeTriton, LoadingTriton, config_with, infer_response, serving
from tests.support import SCENE, call, calling, captured_log, chunk, json, lifespan_of, receiving, staying
from tests.zoo.exported import exported


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
    assert document.items() <= json(await client.get("/v1/models/")).items()  # where a dialect may add to it
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


async def test_model_that_answers_no_single_image_is_unloadable(gateway: Gateway) -> None:
    fake, client = gateway
    fake.config = {**CONFIG, "sequence_batching": {}}
    model = json(await client.get("/models/a"))
    assert (model["state"], model["detail"][:22]) == ("unloadable", "a takes sequences only")


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


async def test_names_beside_the_config_and_the_unit_of_boxes_are_found_when_a_model_is_loaded(tmp_path: Path) -> None:
    """The embedded Triton's config tells neither; the rows for the golden picture tell the unit."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "labels.txt").write_text("door\r\nwindow\r\n", encoding="utf-8")
    fake = FakeTriton()
    fake.knows_picture, fake.index = True, [("tiny", "1", "READY", "")]
    fake.next_refusals = [(grpc.StatusCode.INTERNAL, "it does not bear this picture")]
    fake.answer = infer_response(output0=np.array([[0.25, 0.4, 0.75, 0.6, 0.9, 1], [0] * 6], np.float32))
    async with client_for(fake, model_repository=str(tmp_path)) as client:
        (found,) = json(await client.post("/detect", content=SCENE))["detections"]
        assert (found["x1"], found["x2"], found["class_name"]) == (0.25, 0.75, "window")
        model = json(await client.get("/models/tiny"))
    assert (model["box_units"], model["classes"], model["checked"]) == ("normalized", ["door", "window"], None)


OTHER = "; its config must say another `head`"


@pytest.mark.parametrize(
    ("head", "row", "unit", "doubt"),
    [
        ("yolox", lambda x: [x, x, x + 9, x + 9, 0.1, 0], "pixels", f"its boxes are x1 y1 x2 y2{OTHER}"),
        ("yolov5", lambda x: [x, 9, 4, 4, -9, -9], "pixels", "its scores are logits, such as -9.0: export it with its sigmoid"),
        ("yolov5", lambda x: [x, 9, 4, 4, 0.1, 1], "pixels", ""),  # FP16 rounds the score of its only class
        ("yolo", lambda x: [x, 9, 4, 4, 0.01, 0.1], "pixels", f"its first score is an objectness, and not that of a class{OTHER}"),
        ("end_to_end", lambda _: [-1, -1, -1, -1, -1, -1], None, ""),
        ("end_to_end", lambda x: [0, 0, x / 9, 0.5, 0.1, 0], "normalized", ""),  # a box ends far outside
    ],
)
async def test_rows_tell_the_unit_of_boxes_or_that_they_are_not_of_their_head(
    head: str, row: Callable[[int], list[float]], unit: str | None, doubt: str
) -> None:
    fake = FakeTriton()
    fake.knows_picture, fake.index = True, [("tiny", "1", "READY", "")]
    fake.config = {**config_with(head=head), "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [21, 6]}]}
    fake.answer = infer_response(output0=np.array([row(x) for x in range(21)], np.float32))
    async with client_for(fake) as client:
        model = json(await client.get("/models/tiny"))
    assert (model["box_units"], (model["detail"] or "").rpartition("but ")[2]) == (unit, doubt)


async def test_names_beside_the_config_that_are_not_those_of_the_classes_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, completion)
    (tmp_path / "tiny").mkdir()
    (path := tmp_path / "tiny" / "labels.txt").write_text("door\n", encoding="utf-8")
    fake = FakeTriton()
    # As a YOLOX of two classes.
    fake.config = {**CONFIG, "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [21, 7]}]}
    fake.index = [("tiny", "1", "READY", "")]
    async with client_for(fake, model_repository=str(tmp_path)) as client:
        assert json(await client.get("/models/tiny"))["classes"] == []
    assert [(call.method_name, call.kwargs["file"]) for call in log] == [("warning", str(path))]


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[tuple[LoadingTriton, httpx.AsyncClient]]:
    for name in ("tiny", "doors"):
        (tmp_path / name / "1").mkdir(parents=True)
    (tmp_path / "not_pulled").mkdir()
    fake = LoadingTriton().find_nothing()
    unloaded = [("doors", "1", "UNAVAILABLE", "unloaded"), ("gates", "1", "UNAVAILABLE", "no weights")]
    fake.index = [("tiny", "1", "READY", ""), *unloaded]
    async with client_for(fake, model_repository=str(tmp_path), triton_loads_models=True, loaded_models=3) as client:
        yield fake, client


async def test_model_is_loaded_by_its_first_request_if_there_is_time_and_again_once_it_was_unloaded(
    loading: tuple[LoadingTriton, httpx.AsyncClient],
) -> None:
    fake, client = loading
    for name in ("windows", "not_pulled", "../doors", "doors/1", "."):
        answer = await client.post("/detect", params={"model": name}, content=SCENE)
        assert json(answer, 404)["code"] == "unknown_model"
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


NETWORK = exported({"output0": (7, 84)}, (64, 64), names={0: "door", 1: "window", 2: "gate"}).SerializeToString()


class Service(NamedTuple):
    """An application that adds models to a repository, and a client of it."""

    app: Application
    client: httpx.AsyncClient
    repository: Repository

    def files(self) -> set[str]:
        return {path.name for path in self.repository.path.iterdir()} - {LOCK}


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    repository = tmp_path / "models"
    repository.mkdir()
    fake = FakeTriton()
    async with serving(fake):
        monkeypatch.setattr(admin, "MAX_MODEL_BYTES", 2**18)
        monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(repository))  # for the commands
        monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", fake.url)
        keys = write_keys(tmp_path, ("boss", "secret", "admin"), ("camera", "secret", "detect"))
        settings = settings_for(fake.url, model_repository=str(repository), api_keys_file=keys)
        async with lifespan_of(app := create_app(settings)), calling(app) as client:
            yield Service(app, client, Repository(repository))


async def test_no_caller_changes_models_of_a_gateway_without_keys(tmp_path: Path) -> None:
    async with client_for(FakeTriton(), model_repository=str(tmp_path)) as client:
        for method, path in (("POST", "/models/a"), ("DELETE", "/models/a"), ("PUT", "/models/a/default-version")):
            assert (await client.request(method, path, content=NETWORK)).status_code in {404, 405}
    assert not [*tmp_path.iterdir()]  # noqa: ASYNC240


async def test_file_and_form_are_added(service: Service, tmp_path: Path) -> None:
    """A network with its weights in another file is added as its refusal advises."""
    said = json(await service.client.post("/models/doors?licence=MIT&labels=a,b,c", content=NETWORK, headers=ADMIN), 201)
    assert (said["name"], said["state"]) == ("doors", "not_ready")
    assert "doors:1: detection, 3 classes (a, b, c), 64 x 64" in said["detail"]
    network, path = onnx.load_from_string(NETWORK), tmp_path / "a.onnx"
    onnx.save(network, path, save_as_external_data=True, location="a.data", size_threshold=0)
    refused = await service.client.post("/models/gates", content=path.read_bytes(), headers=ADMIN)
    assert "has its weights in a.data, not beside it: add a zip" in json(refused, 422)["detail"]
    with ZipFile(whole := tmp_path / "a.zip", "w") as archive:
        for file in (path, tmp_path / "a.data"):
            archive.write(file, f"export/{file.name}")
    form: dict[str, Any] = {"labels": (None, "a,b,c"), "iou": (None, "0.5"), "file": ("best.zip", whole.read_bytes())}
    assert (await service.client.post("/models/gates", files=form, headers=ADMIN)).status_code == 201
    found = description.load(service.repository.path / "gates")
    assert found is not None
    assert (found.labels, found.licence, found.source) == (("a", "b", "c"), "unknown", "")
    assert service.files() == {"doors", "gates"}


NO_FORM = {"headers": {**ADMIN, "Content-Type": "multipart/form-data; boundary=x"}, "content": b"no form"}


@pytest.mark.parametrize(
    ("line", "more", "status", "detail"),
    [
        ("POST /models/doors", {"headers": {}}, 401, "send one API key"),
        ("DELETE /models/doors", {"headers": CAMERA}, 403, "does not have the scope 'admin'"),
        ("POST /models/doors?samples=/etc", {}, 400, "unknown parameter 'samples'"),
        ("POST /models/doors?head=x", {}, 422, r"an option is not valid: .*\$.head"),
        ("POST /models/doors", {"content": b"no network"}, 422, "the file is not a complete ONNX network"),
        ("POST /models/doors", {"content": bytes(2**18 + 1)}, 413, "the limit is 0.25 MiB"),
        ("POST /models/doors", NO_FORM, 400, "the form is not well formed"),
        ("POST /models/doors", {"files": [("file", NETWORK), ("image", NETWORK)]}, 400, "the form has more than one file"),
        ("POST /models/-x", {"content": NETWORK}, 422, "'-x' is not a name of a model"),
        ("POST /models/a%00b", {"content": NETWORK}, 404, "a model's name has 1 to 64 letters"),
        ("DELETE /models/a?version=1", {}, 404, "there is no model a in"),
    ],
)
async def test_refused_upload_changes_nothing(service: Service, line: str, more: dict[str, Any], status: int, detail: str) -> None:
    method, _, path = line.partition(" ")
    answer = await service.client.request(method, path, **{"headers": ADMIN, **more})
    assert re.search(detail, json(answer, status)["detail"])
    assert answer.headers["content-type"] == "application/problem+json"
    assert service.files() == set()


async def test_models_are_added_one_at_a_time(service: Service) -> None:
    with service.repository.writing():
        answer = await service.client.post("/models/doors", content=NETWORK, headers=ADMIN)
    assert "another process changes the models" in json(answer, 429)["detail"]
    body, may_end = asyncio.Event(), asyncio.Event()

    async def receive() -> Any:  # noqa: ANN401
        body.set()
        await may_end.wait()
        return chunk(NETWORK)

    slow = asyncio.create_task(call(service.app, receive, "/models/doors", ADMIN))
    await body.wait()
    answer = await service.client.post("/models/gates", content=NETWORK, headers=ADMIN)
    assert json(answer, 429)["detail"] == "another request changes models now"
    may_end.set()
    assert (await slow).status == 201


async def test_added_model_can_be_changed(service: Service) -> None:
    for labels in ("a,b,c", "a,b,c&mean=1,2,3"):
        await service.client.post(f"/models/doors?labels={labels}", content=NETWORK, headers=ADMIN)
    for line, version, status, detail in (
        ("PUT /models/doors/default-version", 1, 200, "doors is version 1 when the Triton at"),
        ("PUT /models/doors/default-version", 3, 404, "doors has no version 3"),
        ("POST /models/doors/load", None, 200, "doors is loaded when"),
        ("POST /models/doors/unload", None, 501, "doors cannot be unloaded: a Triton that runs elsewhere"),
        ("DELETE /models/doors?version=1", None, 422, "doors:1 is the default version"),
    ):
        method, path = line.split()
        answer = await service.client.request(method, path, headers=ADMIN, json={"version": version} if version else None)
        assert detail in json(answer, status)["detail"]
    for chosen in ("?version=2", ""):
        assert (await service.client.delete(f"/models/doors{chosen}", headers=ADMIN)).status_code == 204
    assert service.files() == {REMOVED}


async def test_failure_of_the_gateway_is_no_fault_of_the_model(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def add(status: int) -> httpx.Response:
        answer = await service.client.post("/models/doors", content=NETWORK, headers=ADMIN)
        assert answer.status_code == status, answer.text
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(program, "command", lambda *_: [sys.executable, "-c", "raise KeyError('secret')"])
        answer = await add(500)
        assert (answer.json()["code"], "secret" in answer.text) == ("internal_error", False)
    service.repository.path.rename(service.repository.path.with_name("moved"))
    assert (await add(501)).json()["detail"] == "the model repository cannot be written: No such file or directory"


async def test_client_that_leaves_or_pauses_adds_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    part = chunk(NETWORK[:1000], more=True)
    assert (await call(service.app, receiving(part), "/models/doors", ADMIN)).status == 400
    monkeypatch.setattr(admin, "PAUSE_SECONDS", 0.05)
    reply = await call(service.app, staying(part), "/models/doors", ADMIN)
    assert (reply.status, "without pauses of more than 0.05 s, and on average with 64 KiB/s" in reply.body.decode()) == (408, True)
    assert service.files() == set()
