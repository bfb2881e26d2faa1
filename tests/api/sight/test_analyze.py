"""POST /analyze and /analyze/batch: objects, faces, text and vectors of one image."""

from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.models import RECTANGLES, SIZE, scene
from tests.support import SCENE, json

EMPTY = scene("PNG", shift=500)
ALL = {"include_embedding": "true", "include_face_embeddings": "true"}
KEYS = {"status", "image", "detections", "num_detections", "faces", "num_faces", "global_embedding", "embedding_norm", "ocr"} | {
    *("timing", "total_time_ms", "request_id", "errors", "truncated", "has_text", "error")
}
STEPS = {"objects", "image", "object_embeddings", "faces", "descriptions", "lines", "direction", "text"}


def boxes_of(answer: dict[str, Any], part: str) -> Any:  # noqa: ANN401 - what pytest compares
    return pytest.approx(np.array([each["box"] for each in answer[part]]).reshape(-1, 4), abs=0.02)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_all_parts_come_from_one_image(faces: httpx.AsyncClient, prefix: str) -> None:
    response = await faces.post(f"{prefix}/analyze", files={"image": SCENE}, params=ALL)
    answer = json(response)

    assert (answer.keys(), answer["status"], answer["errors"], answer["truncated"]) == (KEYS, "success", {}, False)
    expected = np.array([*RECTANGLES.values()]) / [*SIZE, *SIZE]
    assert (answer["num_detections"], expected) == (2, boxes_of(answer, "detections"))
    assert (answer["num_faces"], expected) == (2, boxes_of(answer, "faces"))
    assert [(each["class_id"], each["class_name"]) for each in answer["detections"]] == [(0, "red"), (1, "blue")]
    assert all(each.keys() == {"box", "landmarks", "score", "quality", "embedding"} for each in answer["faces"])
    vectors = [each["embedding"] for part in ("detections", "faces") for each in answer[part]]
    assert np.linalg.norm([*vectors, answer["global_embedding"]], axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert np.array(vectors[0]) @ np.array(vectors[1]) < 0.5
    text = answer["ocr"]
    lists = ("texts", "boxes", "boxes_normalized", "det_scores", "rec_scores")
    assert (answer["has_text"], text["texts"], text["full_text"], text["num_texts"]) == (True, ["r"], "r", 1)
    assert text.keys() == {*lists, "full_text", "num_texts"}
    assert [len(text[name]) for name in lists] == [1] * 5
    assert [len(text["boxes"][0]), len(text["boxes_normalized"][0])] == [8, 4]
    assert answer["timing"].keys() == {f"{step}_ms" for step in STEPS}
    names = [entry.partition(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert {*names} >= STEPS
    assert names.count("decode") == 1


async def test_parts_are_those_that_were_asked_for(faces: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    plain = json(await faces.post("/analyze?enable_ocr=false&face_confidence=0.85&confidence=0.85", content=SCENE))
    nothing = json(await faces.post("/analyze", content=EMPTY, params=ALL))
    without_faces = json(await client.post("/analyze", content=SCENE, params=ALL | {"model": "six_columns"}))

    assert (plain["ocr"], plain["global_embedding"], plain["embedding_norm"], plain["has_text"]) == (None, None, None, False)
    assert [each["embedding"] for part in ("detections", "faces") for each in plain[part]] == [None, None]
    assert plain["timing"].keys() == {"objects_ms", "faces_ms"}
    assert (nothing["status"], nothing["detections"], nothing["faces"], nothing["ocr"]["num_texts"]) == ("success", [], [], 0)
    assert len(nothing["global_embedding"]) == 12
    answer = [without_faces[name] for name in ("faces", "num_faces", "num_detections", "status")]
    assert answer == [[], 0, 2, "success"]


@pytest.mark.parametrize(
    ("query", "image", "status", "code"),
    [
        ("model=missing", SCENE, 404, "unknown_model"),
        ("model=embedding", SCENE, 400, "wrong_task"),
        ("model=six_columns&version=7", SCENE, 404, "unknown_version"),
        ("face_confidence=2", SCENE, 400, "invalid_parameter"),
        ("", b"junk", 415, "unsupported_format"),
    ],
)
async def test_analysis_fails_without_its_detector_or_image(
    faces: httpx.AsyncClient, query: str, image: bytes, status: int, code: str
) -> None:
    assert json(await faces.post(f"/analyze?{query}", content=image), status)["code"] == code
    for path, number in (("/analyze", "num_detections"), ("/analyze/batch", "total_detections")):
        answer = json(await faces.post(f"{path}?model=six_columns&version=1&enable_ocr=false", files={"image": SCENE}))
        assert answer[number] == 2


async def test_results_of_a_batch_are_summaries(faces: httpx.AsyncClient) -> None:
    files = [("images", (f"{index}.png", image)) for index, image in enumerate([SCENE, b"junk", EMPTY])]
    answer = json(await faces.post("/v1/analyze/batch", files=files))
    full = json(await faces.post("/analyze/batch?enable_ocr=true&include_full_results=true&include_embedding=true", files=files))

    assert (answer["status"], answer["total_images"], answer["processed_images"], answer["failed_images"]) == ("partial", 3, 2, 1)
    assert (answer["total_detections"], answer["total_faces"], answer["images_with_text"]) == (2, 2, 0)
    for result, objects in zip(answer["results"], (2, 0), strict=True):
        assert {"filename", "image_index", "status", "error", "image", "num_faces", "has_text"} <= result.keys()
        assert (result["num_detections"], result["has_text"], result["detections"], result["ocr"]) == (objects, False, None, None)
    assert [(failure["filename"], failure["index"]) for failure in answer["failures"]] == [("1.png", 1)]
    assert (full["images_with_text"], full["results"][0]["has_text"], full["results"][0]["ocr"]["texts"]) == (1, True, ["r"])
    assert [len(each["embedding"]) for each in full["results"][0]["detections"]] == [12, 12]
    assert [result["image_index"] for result in full["results"]] == [0, 2]
