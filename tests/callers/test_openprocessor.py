"""Replays of the calls of OpenProcessor's scripts, which has no client to install, with all keys that they read in answers."""

from typing import Any

import httpx
import numpy as np
import pytest

from tests.callers.conftest import LINES, MODEL, PAGE, PORTRAIT
from tests.support import sample_image

CAT = sample_image("chelsea.jpg")
ALL = {"include_embedding": True, "include_face_embeddings": True, "enable_ocr": True}
ANSWER, TEXTS = "total_time_ms request_id", "texts full_text num_texts"
DETECTED = (
    "detections.x1 detections.y2 detections.confidence detections.class detections.class_name num_detections status image.width"
)
FACE = "faces.box faces.landmarks faces.score faces.quality num_faces image.height"
BATCH = "total_images processed_images failed_images status failures.filename failures.error failures.index"
LINE = "regions.text regions.box_normalized regions.det_score regions.rec_score"
OF_VECTORS = "results.filename results.error results.embedding_norm results.index"
OF_BATCH = "results.filename results.status results.image_index results.image"

pytestmark = pytest.mark.client("OpenProcessor")
both = pytest.mark.parametrize("prefix", ["", "/v1"])


def read(response: httpx.Response, *keys: str) -> Any:  # noqa: ANN401 - JSON
    """Decode an answer, which must have these keys; those after a dot are in each member, of which there is at least one."""
    assert response.is_success, response.text
    answer = response.json()
    for key in " ".join(keys).split():
        name, _, inner = key.partition(".")
        members = answer[name] if isinstance(answer[name], list) else [answer[name]]
        assert not inner or (members and all(inner in member for member in members)), key
    return answer


def assert_refused(response: httpx.Response, status: int) -> str:
    """Check an error: `detail` is a sentence, which is returned."""
    detail = response.json()["detail"]
    assert (response.status_code, type(detail)) == (status, str), response.url
    return str(detail)


def one(image: bytes, name: str = "image") -> dict[str, tuple[str, bytes, str]]:
    return {name: ("photo.jpg", image, "image/jpeg")}


def several(*images: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("images", (f"{number}.jpg", image, "image/jpeg")) for number, image in enumerate(images)]


@both
def test_detection(own: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: a photo to `/detect` and `/predict/{model}`, a broken one in `/detect/batch`; models and health."""
    params = {"confidence": "0.3", "shared_client": "true"}
    expected = own.post("/detect?confidence=0.3", content=CAT).json()["detections"]
    for response in (
        own.post(f"{prefix}/detect", files=one(CAT), params=params | {"model_name": MODEL}),
        own.post(f"{prefix}/detect", files=one(CAT), data={"model_name": MODEL, "confidence": "0.3"}),
        own.post(f"{prefix}/predict/{MODEL}", files=one(CAT), params=params),
    ):
        found = read(response, ANSWER, DETECTED)
        assert (found["detections"], found["status"], found["model"]["name"]) == (expected, "success", MODEL)
    batch = read(own.post(f"{prefix}/detect/batch", files=several(CAT, CAT[:99]), params=params), BATCH, OF_BATCH)
    (result,), (failure,) = batch["results"], batch["failures"]
    assert (result["filename"], result["image_index"], result["detections"]) == ("0.jpg", 0, expected)
    assert (failure["filename"], failure["index"], batch["status"]) == ("1.jpg", 1, "partial")
    listed = read(own.get(f"{prefix}/models/"), "models.versions models.has_labels models.input_shape models.backend")
    assert (listed["triton_status"], listed["total"]) == ("READY", len(listed["models"]))
    assert {model["name"] for model in listed["models"] if model["status"] == "READY"} == {MODEL}  # others could be pulled
    ready, health = own.get(f"{prefix}/ready").json(), own.get(f"{prefix}/health").json()
    assert (ready["status"], ready["services"]["triton"]["ok"]) == ("ready", True)
    assert own.get(f"{prefix}/live").json() == {"status": "alive"}
    assert (health["status"], health["triton"], health["performance"]["memory_mb"] > 0) == ("healthy", "healthy", True)


@both
def test_errors(own: httpx.Client, sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: invalid requests, and what is off or not there, such as `/ingest`: `detail` is a sentence."""
    assert_refused(own.post(f"{prefix}/detect", files=one(b"")), 400)
    assert_refused(own.post(f"{prefix}/detect?model_name=yolov11_small_trt_end2end", files=one(CAT)), 404)
    assert_refused(own.post(f"{prefix}/detect", files=one(b"no picture")), 415)
    assert_refused(sight.post(f"{prefix}/faces/verify", files={**one(PORTRAIT, "image1"), **one(PAGE, "image2")}), 400)
    for path in ("ingest", "search/image", "faces/search", "faces/identify", "ocr/search"):
        assert "`nereid serve --search` turns it on" in assert_refused(sight.post(f"{prefix}/{path}", files=one(CAT)), 404)
    assert "NEREID_FACES" in assert_refused(own.post("/faces/detect", files=one(PORTRAIT)), 404)


@both
def test_text_faces_and_vectors(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: text, faces, vectors and analyses of one image, and of several, one of which is broken."""
    pair = {**one(PORTRAIT, "image1"), **one(PORTRAIT, "image2")}
    calls: dict[str, tuple[Any, dict[str, Any], str]] = {
        "ocr/predict": (one(PAGE), {}, f"{TEXTS} status error {LINE}"),
        "ocr/batch": (several(PAGE, PAGE[:99]), {}, f"{BATCH} {OF_BATCH} total_text_regions images_with_text"),
        "faces/detect": (one(PORTRAIT), {}, FACE),
        "faces/recognize": (one(PORTRAIT), {}, f"{FACE} embeddings"),
        "faces/verify": (pair, {}, "image1.num_faces image2.face_used threshold match similarity"),
        "embed/image": (one(PORTRAIT), {}, "embedding_norm indexed image_id status"),
        "embed/batch": (several(PORTRAIT, PORTRAIT[:99]), {}, f"{OF_VECTORS} total successful failed"),
        "embed/boxes": (one(PORTRAIT), {"data": {"boxes": "[[0, 0, 1, 1]]"}}, "boxes.box num_boxes status"),
        "analyze": (one(PORTRAIT), {"params": ALL}, f"{FACE} num_detections detections.box detections.class_id timing"),
        "analyze/batch": (several(PAGE, PAGE[:99]), {"params": ALL}, f"{BATCH} results.num_faces total_detections"),
    }
    found = {
        path: read(sight.post(f"{prefix}/{path}", files=files, **given), ANSWER, keys)
        for path, (files, given, keys) in calls.items()
    }

    assert found["ocr/predict"]["texts"] == found["ocr/batch"]["results"][0]["texts"] == LINES
    assert (len(found["faces/detect"]["faces"]), found["faces/verify"]["match"]) == (1, True)
    assert np.dot(found["embed/boxes"]["boxes"][0]["embedding"], found["embed/image"]["embedding"]) > 0.99
    analysis = found["analyze"]
    assert "person" in {detection["class_name"] for detection in analysis["detections"]}
    assert all((analysis["global_embedding"], analysis["faces"][0]["embedding"], analysis["ocr"]))
    assert found["analyze/batch"]["results"][0]["has_text"]
