"""Replays of the calls of OpenProcessor's scripts and Makefile, which has no client to install, at both places of its paths."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import msgspec
import pytest

from tests.callers.conftest import MODEL
from tests.support import sample_image

PHOTO = sample_image("chelsea.jpg")
PREFIXES = ("", "/v1")
LEFT_OUT = ("ingest", "search/image")

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Model(msgspec.Struct):
    name: str
    status: str
    versions: list[str]
    backend: str | None
    max_batch_size: int | None
    has_labels: bool
    num_classes: int | None
    input_shape: list[int] | None


class Models(msgspec.Struct):
    models: list[Model]
    total: int
    triton_status: str


class Detection(msgspec.Struct):
    x1: Share
    y1: Share
    x2: Share
    y2: Share
    confidence: Share
    class_id: int = msgspec.field(name="class")
    class_name: str = ""


class Result(msgspec.Struct):
    detections: list[Detection]
    num_detections: int
    status: str
    image: dict[str, int]
    model: dict[str, str]
    total_time_ms: float
    request_id: str


class OneOfBatch(msgspec.Struct):
    filename: str
    image_index: int
    detections: list[Detection]
    num_detections: int
    status: str
    image: dict[str, int]


class Failure(msgspec.Struct):
    filename: str
    index: int
    error: str


class Batch(msgspec.Struct):
    total_images: int
    processed_images: int
    failed_images: int
    results: list[OneOfBatch]
    failures: list[Failure]
    status: str
    total_time_ms: float


@pytest.fixture(autouse=True)
def version(record_property: Callable[[str, object], None]) -> None:
    record_property("version", "c287cd5")


@pytest.mark.client("OpenProcessor")
def test_detection(own: httpx.Client) -> None:
    """Its calls, rewritten: a photo to `/detect` and `/predict/{model}`, a broken one in `/detect/batch`; also under `/v1`."""
    params = {"confidence": "0.3", "shared_client": "true"}
    image = {"image": ("photo.jpg", PHOTO, "image/jpeg")}
    expected = msgspec.json.decode(own.post("/detect?confidence=0.3", content=PHOTO).content, type=Result)
    assert expected.num_detections > 0
    for prefix in PREFIXES:
        for response in (
            own.post(f"{prefix}/detect", files=image, params=params),
            own.post(f"{prefix}/detect", files=image, params=params | {"model_name": MODEL}),
            own.post(f"{prefix}/detect", files=image, data={"model_name": MODEL, "confidence": "0.3"}),
            own.post(f"{prefix}/predict/{MODEL}", files=image, params=params),
        ):
            found = msgspec.json.decode(response.content, type=Result)
            assert found.detections == expected.detections
            assert (found.status, found.model["name"]) == ("success", MODEL)
            assert found.request_id == response.headers["x-request-id"]
            assert response.headers["x-process-time"].endswith("ms")
        pictures = [("images", ("photo.jpg", PHOTO, "image/jpeg")), ("images", ("broken.jpg", PHOTO[:99], "image/jpeg"))]
        batch = msgspec.json.decode(own.post(f"{prefix}/detect/batch", files=pictures, params=params).content, type=Batch)
        assert (batch.total_images, batch.processed_images, batch.failed_images, batch.status) == (2, 1, 1, "partial")
        assert [(one.filename, one.image_index) for one in batch.results] == [("photo.jpg", 0)]
        assert batch.results[0].detections == expected.detections
        assert [(one.filename, one.index) for one in batch.failures] == [("broken.jpg", 1)]


@pytest.mark.client("OpenProcessor")
def test_models_and_state(own: httpx.Client) -> None:
    """Its calls, rewritten: the list of models with a status of each, the service and its health."""
    for prefix in PREFIXES:
        for path in ("/models", "/models/"):
            listed = msgspec.json.decode(own.get(prefix + path).content, type=Models)
            assert (listed.triton_status, listed.total) == ("READY", len(listed.models))
            statuses = {model.name: model.status for model in listed.models}
            assert statuses.pop(MODEL) == "READY"
            assert {*statuses.values()} == {"UNAVAILABLE"}  # those that could be pulled
        service: dict[str, Any] = own.get(f"{prefix}/").json()
        assert service["status"] == "running"
        assert service["api_versions"] == {"current": "v1", "supported": ["v1"], "deprecated": []}
        assert own.get(prefix + service["endpoints"]["models"]).status_code == 200
        ready = own.get(f"{prefix}/ready").json()
        assert (ready["status"], ready["services"]["triton"]["ok"]) == ("ready", True)
        assert own.get(f"{prefix}/live").json() == {"status": "alive"}
        health = own.get(f"{prefix}/health").json()
        assert (health["status"], health["triton"]) == ("healthy", "healthy")
        assert health["performance"]["memory_mb"] > 0


@pytest.mark.client("OpenProcessor")
def test_errors(own: httpx.Client) -> None:
    """Its calls, rewritten: invalid requests, and what the gateway does not have, such as `/ingest`: `detail` is a sentence."""
    image = {"image": ("photo.jpg", PHOTO, "image/jpeg")}
    for prefix in PREFIXES:
        answers = {
            400: own.post(f"{prefix}/detect", files={"image": ("photo.jpg", b"", "image/jpeg")}),
            404: own.post(f"{prefix}/detect?model_name=yolov11_small_trt_end2end", files=image),
            415: own.post(f"{prefix}/detect", files={"image": ("photo.jpg", b"no picture", "image/jpeg")}),
        }
        for status, answer in answers.items():
            assert (answer.status_code, type(answer.json()["detail"])) == (status, str)
        for path in LEFT_OUT:
            answer = own.post(f"{prefix}/{path}", files=image)
            assert answer.status_code == 404
            assert re.search("this path does not exist|`nereid serve --search` turns it on", answer.json()["detail"])
