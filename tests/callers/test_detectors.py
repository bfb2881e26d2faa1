"""The clients of DeepStack, CodeProject.AI, Ultralytics HUB and NVIDIA NIM, and pycocotools."""

import json
import os
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from PIL import Image

from tests.callers.client import environment, run
from tests.callers.conftest import KEY, MODEL, PAGE, PORTRAIT
from tests.processes import PATIENCE_SECONDS
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import IMAGES, sample_image

Object = tuple[Any, ...]
"""Label, confidence and corners in pixels."""

CAT = str(IMAGES / "chelsea.jpg")


@pytest.fixture
def no_image(tmp_path: Path) -> str:
    (tmp_path / "text.jpg").write_text("no image", encoding="utf-8")
    return str(tmp_path / "text.jpg")


def to_settings(gateway: str, **others: object) -> str:
    address = urlsplit(gateway)
    return json.dumps({"ip": address.hostname, "port": address.port, "timeout": PATIENCE_SECONDS, **others})


def expect(own: httpx.Client, confidence: float) -> list[Object]:
    """Return the objects that /detect finds, which DeepStack describes in whole pixels."""
    content = sample_image("chelsea.jpg")
    found = own.post(f"/detect?boxes=pixel&confidence={confidence}", content=content).json()["detections"]
    assert found
    sides = ("x1", "y1", "x2", "y2")
    return [(one["class_name"], one["confidence"], *(pytest.approx(one[side], abs=0.51) for side in sides)) for one in found]


def read(predictions: list[dict[str, Any]]) -> list[Object]:
    return [tuple(one[name] for name in ("label", "confidence", "x_min", "y_min", "x_max", "y_max")) for one in predictions]


BOTH = [pytest.param(name, marks=pytest.mark.client(name)) for name in ("deepstack-python", "codeproject-ai-api")]


@pytest.mark.parametrize("client", BOTH)
def test_objects(client: str, gateway: str, own: httpx.Client, no_image: str) -> None:
    """Its class for objects: a photo with two confidences and with `custom_model`, and a file that is no image."""
    for confidence, others in ((0.45, {}), (0.1, {}), (0.3, {"custom_model": MODEL})):
        settings = to_settings(gateway, min_confidence=confidence, **others)
        found, error = run(client, "calls", "deepstack", client, "objects", settings, CAT, no_image)
        assert read(found) == expect(own, confidence)
        assert error.endswith((" status code: 400", " error: 400"))


@pytest.mark.client("deepstack-sdk")
def test_deepstack_sdk(gateway: str, locked: str, own: httpx.Client, no_image: str, tmp_path: Path) -> None:
    """`Detection`: a photo, a model by its name, an annotated output, a file that is no image, a right and a wrong key."""
    found = run("deepstack-sdk", "calls", "deepstack_sdk", gateway, str(tmp_path), "", CAT, no_image)
    objects, error = found["pictures"]

    assert [tuple(one) for one in objects] == expect(own, 0.4)
    assert found["custom"] == objects
    assert error == "Invalid image"
    with Image.open(tmp_path / "chelsea.jpg") as drawn, Image.open(CAT) as sent:
        assert drawn.size == sent.size
        assert drawn != sent
    right, wrong = (run("deepstack-sdk", "calls", "deepstack_sdk", locked, str(tmp_path), key, CAT) for key in (KEY, "wrong"))
    assert right["pictures"] == [objects]
    assert wrong["pictures"] == ["Unknown error : 401 occured"]


@pytest.mark.parametrize("client", BOTH)
def test_faces(client: str, sight_url: str, sight: httpx.Client, tmp_path: Path) -> None:
    """Its class for faces: the face of a portrait, a page without one; `recognize` says that names of faces are not there."""
    (tmp_path / "page.png").write_bytes(PAGE)
    pictures = str(IMAGES / "astronaut.jpg"), str(tmp_path / "page.png")
    portrait, page, error = run(client, "calls", "deepstack", client, "faces", to_settings(sight_url), *pictures)
    own = sight.post("/faces/detect", content=PORTRAIT).json()["faces"]

    assert [set(face) for face in portrait] == [{"confidence", "x_min", "y_min", "x_max", "y_max"}]
    for face, expected in zip(portrait, own, strict=True):
        sides = [face[side] / 512 for side in ("x_min", "y_min", "x_max", "y_max")]
        assert face["confidence"] == expected["score"]
        assert sides == pytest.approx(expected["box"], abs=0.002)
    assert page == []
    assert error.endswith("/v1/vision/face/recognize raised error 404")


PHOTO = IMAGES / "astronaut.jpg"


def predict(key: str = "any", model: str = MODEL, picture: Path = PHOTO, **parameters: float) -> dict[str, Any]:
    answer: dict[str, Any] = run("hub-sdk", "calls", "hub", key, model, str(picture), json.dumps(parameters))
    return answer


@pytest.mark.client("hub-sdk")
def test_hub_finds_the_boxes_of_a_photo(gateway: str, own: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model by its name, and a photo with `conf`, `iou` and `imgsz`: the boxes of `/detect`."""
    monkeypatch.setenv("ULTRALYTICS_HUB_API", f"{gateway}/ultralytics")
    found = predict(conf=0.1, iou=0.6, imgsz=640)
    expected = own.post("/detect?boxes=pixel&confidence=0.1&iou=0.6", content=sample_image(PHOTO.name)).json()["detections"]
    (image,) = found["answer"]["images"]

    assert len(expected) > 1
    assert found["model"]["id"] == MODEL
    assert [(one["name"], one["confidence"]) for one in image["results"]] == [
        (one["class_name"], pytest.approx(one["confidence"], abs=1e-4)) for one in expected
    ]
    assert [one["box"] for one in image["results"]] == [
        pytest.approx({side: one[side] for side in ("x1", "y1", "x2", "y2")}, abs=0.01) for one in expected
    ]
    assert found["log"] == ""


@pytest.mark.client("hub-sdk")
def test_hub_logs_errors(gateway: str, locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown model, a file that is no picture, a bad `conf`, a wrong API key: the SDK logs what is wrong; and a right key."""
    monkeypatch.setenv("ULTRALYTICS_HUB_API", f"{gateway}/ultralytics")
    wrong = {"Resource not found.": predict(model="nothing"), "Bad Request": predict(conf=2)}
    no_picture = predict(picture=Path(__file__))
    monkeypatch.setenv("ULTRALYTICS_HUB_API", f"{locked}/ultralytics")
    right, wrong["Invalid API key"] = predict(KEY), predict("hub.wrong")

    assert (right["log"], len(right["answer"]["images"])) == ("", 1)
    assert (no_picture["answer"], no_picture["log"]) == (None, "Bad Request\n")
    for message, found in wrong.items():
        assert found["answer"] is None
        assert message in found["log"]


@pytest.mark.client("aiperf")
def test_aiperf(gateway: str, locked: str, own: httpx.Client, tmp_path: Path) -> None:
    """A profile with an API key and two photos in a request, after its wait for the model: no error, the boxes of `/detect`."""
    photos = [str(IMAGES / name) for name in ("chelsea.jpg", "coffee.jpg")]
    lines = [json.dumps({"images": some}) for some in (photos, photos[::-1])]
    (listed := tmp_path / "images.jsonl").write_text("\n".join(lines))
    command = [
        str(environment("aiperf").python().with_name("aiperf")),
        *("profile", "--model", MODEL, "--endpoint-type", "image_retrieval", "--url", locked, "--api-key", KEY),
        *("--concurrency", "2", "--request-count", "10"),
        *("--input-file", str(listed), "--custom-dataset-type", "single_turn"),
        *("--wait-for-model-timeout", "60", "--wait-for-model-mode", "models"),
        *("--server-metrics", f"{gateway}/metrics"),  # it sends no key there
        *("--export-level", "raw", "--output-artifact-dir", str(tmp_path / "out")),
    ]
    own_folder = {**os.environ, "TMPDIR": str(tmp_path)}  # for its sockets, and its copy of the images
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=own_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    summary, metrics = (
        msgspec.json.decode((tmp_path / "out" / f"{name}.json").read_bytes())
        for name in ("profile_export_aiperf", "server_metrics_export")
    )
    records = (tmp_path / "out" / "profile_export_raw.jsonl").read_bytes().splitlines()

    assert (summary["request_count"]["avg"], summary["num_images"]["avg"], summary["error_summary"]) == (10, 2, [])
    assert metrics["metrics"]["api_requests"]
    assert len(records) == 10
    for record in map(msgspec.json.decode, records):
        (response,) = record["responses"]
        answers = msgspec.json.decode(response["text"])["data"]
        assert [one["index"] for one in answers] == [0, 1]
        for answer, sent in zip(answers, record["payload"]["input"], strict=True):
            image = b64decode(sent["url"].partition(",")[2])
            expected = own.post("/detect?boxes=normalized&confidence=0.25", content=image).json()["detections"]
            boxes = {(name, one["x_min"], one["y_max"]) for name, some in answer["bounding_boxes"].items() for one in some}
            assert boxes == {(one["class_name"], one["x1"], one["y2"]) for one in expected} != set()


COCO_PHOTOS = {139: IMAGES / "coffee.jpg", 285: IMAGES / "chelsea.jpg", 632: IMAGES / "astronaut.jpg"}
"""By their ids in the data set."""


def evaluate(folder: Path, truth: dict[str, Any], results: list[dict[str, Any]], kind: str) -> list[float]:
    """Return the AP, and that at an IoU of 0.5."""
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "results.json").write_text(json.dumps(results))
    found: list[float] = run("pycocotools", "calls", "evaluate", str(folder / "truth.json"), str(folder / "results.json"), kind)[:2]
    return found


@pytest.mark.client("pycocotools")
def test_coco_results_of_a_batch(own: httpx.Client, tmp_path: Path) -> None:
    """Boxes of a batch, with gaps between the category ids: AP 1 for the own boxes, 0.7 if they move by a tenth of their width."""
    classes = next(one["classes"] for one in own.get("/models").json()["models"] if one["name"] == "yolo11n")
    truth: dict[str, Any] = {"images": [], "annotations": []}
    truth["categories"] = [{"id": 2 * class_ + 1, "name": name} for class_, name in enumerate(classes)]
    for id_, photo in COCO_PHOTOS.items():
        answer = own.post("/detect?boxes=coco&confidence=0.4", content=photo.read_bytes()).json()
        truth["images"].append({"id": id_, **answer["image"]})
        for one in answer["detections"]:
            _, _, width, height = one["bbox"]
            annotation = {"id": len(truth["annotations"]) + 1, "image_id": id_, "category_id": 2 * one["class_id"] + 1}
            truth["annotations"].append({**annotation, "bbox": one["bbox"], "area": width * height, "iscrowd": 0})
    data = {"image_ids": ",".join(map(str, COCO_PHOTOS))}
    files = [("images", photo.read_bytes()) for photo in COCO_PHOTOS.values()]
    results = own.post("/detect/batch?format=coco-results&confidence=0.4", data=data, files=files).json()
    moved = [{**one, "bbox": [one["bbox"][0] + one["bbox"][2] / 10, *one["bbox"][1:]]} for one in results]

    assert len(truth["annotations"]) > len(COCO_PHOTOS)
    assert evaluate(tmp_path, truth, results, "bbox") == pytest.approx([1, 1])
    # The IoU is 0.9 / 1.1: enough at 7 of the 10 thresholds from 0.5 to 0.95.
    assert evaluate(tmp_path, truth, moved, "bbox") == pytest.approx([0.7, 1])
