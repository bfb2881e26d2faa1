"""Replays of the calls of OpenProcessor's scripts and Makefile, which has no client to install, at both places of its paths."""

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from tests.callers import openprocessor as shapes
from tests.callers.conftest import MODEL
from tests.callers.openprocessor import PREFIXES, assert_refused, one, read, several
from tests.callers.pictures import LINES, PAGE, PORTRAIT
from tests.support import sample_image

PHOTO = sample_image("chelsea.jpg")

pytestmark = pytest.mark.client("OpenProcessor")
both = pytest.mark.parametrize("prefix", PREFIXES)


@both
def test_detection(own: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: a photo to `/detect` and `/predict/{model}`, a broken one in `/detect/batch`; also under `/v1`."""
    params = {"confidence": "0.3", "shared_client": "true"}
    expected = read(own.post("/detect?confidence=0.3", content=PHOTO), shapes.DETECTIONS)["detections"]
    assert expected
    for response in (
        own.post(f"{prefix}/detect", files=one(PHOTO), params=params),
        own.post(f"{prefix}/detect", files=one(PHOTO), params=params | {"model_name": MODEL}),
        own.post(f"{prefix}/detect", files=one(PHOTO), data={"model_name": MODEL, "confidence": "0.3"}),
        own.post(f"{prefix}/predict/{MODEL}", files=one(PHOTO), params=params),
    ):
        found = read(response, shapes.DETECTIONS)
        assert (found["detections"], found["status"], found["model"]["name"]) == (expected, "success", MODEL)
        assert response.headers["x-process-time"].endswith("ms")
    batch = read(own.post(f"{prefix}/detect/batch", files=several(PHOTO, PHOTO[:99]), params=params), shapes.MANY_DETECTIONS)
    counts = batch["total_images"], batch["processed_images"], batch["failed_images"], batch["status"]
    assert counts == (2, 1, 1, "partial")
    (result,), (failure,) = batch["results"], batch["failures"]
    assert (result["filename"], result["image_index"], result["detections"]) == ("0.jpg", 0, expected)
    assert (failure["filename"], failure["index"]) == ("1.jpg", 1)


@both
def test_models_and_state(own: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the list of models with a status of each, the service and its health."""
    for path in ("/models", "/models/"):
        listed = read(own.get(prefix + path), shapes.MODELS)
        assert (listed["triton_status"], listed["total"]) == ("READY", len(listed["models"]))
        statuses = {model["name"]: model["status"] for model in listed["models"]}
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


@both
def test_errors(own: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: invalid requests, and what the gateway does not have, such as `/ingest`: `detail` is a sentence."""
    assert_refused(own.post(f"{prefix}/detect", files=one(b"")), 400)
    assert_refused(own.post(f"{prefix}/detect?model_name=yolov11_small_trt_end2end", files=one(PHOTO)), 404)
    assert_refused(own.post(f"{prefix}/detect", files=one(b"no picture")), 415)
    for path in ("ingest", "search/image"):
        detail = assert_refused(own.post(f"{prefix}/{path}", files=one(PHOTO)), 404)
        assert re.search("this path does not exist|`nereid serve --search` turns it on", detail)


@both
def test_text(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the text of a page, with both scores, and of several images, one of which is broken."""
    params = {"min_det_score": 0.5, "min_rec_score": 0.8}
    found = read(sight.post(f"{prefix}/ocr/predict", files=one(PAGE), params=params), shapes.READ)
    assert (found["status"], found["texts"], found["full_text"].split("\n"), found["num_texts"]) == ("success", LINES, LINES, 2)
    assert (found["image"], found["error"]) == ({"width": 640, "height": 240}, None)
    assert [region["text"] for region in found["regions"]] == LINES
    for region in found["regions"]:
        corners = np.reshape(region["box"], (4, 2)) / (640, 240)
        assert [*corners.min(axis=0), *corners.max(axis=0)] == pytest.approx(region["box_normalized"], abs=1e-4)
    response = sight.post(f"{prefix}/ocr/predict", files=one(PAGE), params={"min_rec_score": 1, "filter_by_score": True})
    none = read(response, shapes.READ)
    assert (none["status"], none["texts"], none["full_text"], none["num_texts"]) == ("success", [], "", 0)

    batch = read(sight.post(f"{prefix}/ocr/batch", files=several(PAGE, PORTRAIT, PAGE[:99])), shapes.MANY_READ)
    counts, results = [result["num_texts"] for result in batch["results"]], batch["results"]
    assert (batch["total_images"], batch["processed_images"], batch["failed_images"], batch["status"]) == (3, 2, 1, "partial")
    assert (results[0]["filename"], results[0]["texts"], results[1]["image_index"]) == ("0.jpg", LINES, 1)
    assert (batch["total_text_regions"], batch["images_with_text"]) == (sum(counts), sum(count > 0 for count in counts))
    assert [failure["filename"] for failure in batch["failures"]] == ["2.jpg"]


@both
def test_faces(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the face of a portrait, its vector, two portraits compared, and one with a picture without a face."""
    found, recognized = (
        read(sight.post(f"{prefix}/faces/{path}", files=one(PORTRAIT), params={"confidence": 0.5}), shape)
        for path, shape in (("detect", shapes.FACES), ("recognize", shapes.RECOGNIZED))
    )
    (face,), (embedding,) = found["faces"], recognized["embeddings"]
    assert (found["num_faces"], recognized["num_faces"], recognized["faces"]) == (1, 1, [face])
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-4)
    x1, y1, x2, y2 = face["box"]
    assert all(x1 < x < x2 for x in face["landmarks"][::2])
    assert all(y1 < y < y2 for y in face["landmarks"][1::2])

    pair = {**one(PORTRAIT, "image1"), **one(PORTRAIT, "image2")}
    same = read(sight.post(f"{prefix}/faces/verify", files=pair, params={"threshold": 0.6}), shapes.VERIFIED)
    assert (same["match"], same["threshold"], same["similarity"]) == (True, 0.6, pytest.approx(1, abs=1e-3))
    assert same["image1"] == same["image2"] == {"num_faces": 1, "face_used": 0}
    assert_refused(sight.post(f"{prefix}/faces/verify", files={**one(PORTRAIT, "image1"), **one(PAGE, "image2")}), 400)
    assert read(sight.post(f"{prefix}/faces/recognize", files=one(PAGE)), shapes.RECOGNIZED)["embeddings"] == []


@both
def test_vectors(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the vector of an image, of several, one of which is broken, and of boxes in an image."""
    params: dict[str, str | bool] = {"use_cache": True, "index": False, "image_id": "portrait"}
    found = read(sight.post(f"{prefix}/embed/image", files=one(PORTRAIT), params=params), shapes.EMBEDDED)
    assert (found["indexed"], found["image_id"], found["status"]) == (False, "portrait", "success")
    assert np.linalg.norm(found["embedding"]) == pytest.approx(1, abs=1e-4)

    batch = read(sight.post(f"{prefix}/embed/batch", files=several(PORTRAIT, PORTRAIT[:99])), shapes.MANY_EMBEDDED)
    right, wrong = sorted(batch["results"], key=lambda result: int(result["index"]))
    assert (batch["total"], batch["successful"], batch["failed"]) == (2, 1, 1)
    assert right["embedding"] == pytest.approx(found["embedding"], abs=1e-5)
    assert (right["filename"], right["error"], wrong["embedding"], wrong["filename"]) == ("0.jpg", None, None, "1.jpg")
    assert wrong["error"]

    boxes = [[0.0, 0.0, 1.0, 1.0], [0.25, 0.0, 0.75, 0.5]]
    response = sight.post(f"{prefix}/embed/boxes", files=one(PORTRAIT), data={"boxes": json.dumps(boxes)})
    parts = read(response, shapes.EMBEDDED_BOXES)
    assert ([part["box"] for part in parts["boxes"]], parts["num_boxes"], parts["status"]) == (boxes, 2, "success")
    assert np.dot(parts["boxes"][0]["embedding"], found["embedding"]) > 0.99


@both
def test_analyses(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: objects, faces, text and vectors of one image in one answer, with parts left out, and of several."""
    on: dict[str, float] = dict.fromkeys(("include_embedding", "include_face_embeddings", "enable_ocr"), True)
    scores = {"confidence": 0.4, "face_confidence": 0.5}
    found = read(sight.post(f"{prefix}/analyze", files=one(PORTRAIT), params=on | scores), shapes.ANALYZED)
    assert (found["status"], found["num_detections"], found["num_faces"]) == ("success", len(found["detections"]), 1)
    assert "person" in {detection["class_name"] for detection in found["detections"]}
    assert found["global_embedding"]
    assert found["faces"][0]["embedding"]
    assert found["ocr"]
    least = read(sight.post(f"{prefix}/analyze", files=one(PORTRAIT), params=dict.fromkeys(on, False)), shapes.ANALYZED)
    assert (least["status"], least["global_embedding"], least["faces"][0]["embedding"]) == ("success", None, None)
    assert not (least["ocr"] and least["ocr"]["texts"])

    pictures = several(PORTRAIT, PAGE, PAGE[:99])
    batch = read(sight.post(f"{prefix}/analyze/batch", files=pictures, params={"enable_ocr": True}), shapes.MANY_ANALYZED)
    assert (batch["total_images"], batch["processed_images"], batch["failed_images"]) == (3, 2, 1)
    assert batch["results"][1]["has_text"]
    for total, part in (("total_detections", "num_detections"), ("total_faces", "num_faces"), ("images_with_text", "has_text")):
        assert batch[total] == sum(result[part] for result in batch["results"])


def test_routes_that_are_off_are_404_with_a_sentence(sight: httpx.Client, own: httpx.Client) -> None:
    """Its calls, rewritten: searches, an index and vectors of texts get 404 with a sentence; so do faces unless they are on."""
    for path in (f"{prefix}/{path}" for prefix in PREFIXES for path in ("faces/search", "faces/identify", "ocr/search")):
        assert_refused(sight.post(path, files=one(PORTRAIT)), 404)
    assert_refused(sight.post("/embed/image?index=true", files=one(PORTRAIT)), 404)
    assert_refused(sight.post("/embed/text", json={"text": "a dog"}), 404)
    assert "NEREID_FACES" in assert_refused(own.post("/faces/detect", files=one(PORTRAIT)), 404)
