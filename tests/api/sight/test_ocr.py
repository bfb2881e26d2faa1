"""POST /ocr/predict and /ocr/batch: the text that three models find, straighten and read."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.models import RECTANGLES, SIZE, scene
from tests.support import SCENE, json

EMPTY = scene("PNG", shift=500)
KEYS = {"status", "texts", "regions", "full_text", "num_texts", "image", "error", "truncated", "total_time_ms", "request_id"}
BATCH_KEYS = {"status", "total_images", "processed_images", "failed_images", "results", "failures", "total_time_ms", "request_id"}


def texts(answer: dict[str, Any]) -> set[str]:
    assert answer["num_texts"] == len(answer["texts"]) == len(answer["regions"])
    assert answer["texts"] == [region["text"] for region in answer["regions"]]
    assert answer["full_text"] == "\n".join(answer["texts"])
    return set(answer["texts"])


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_has_its_place_and_its_scores(client: httpx.AsyncClient, prefix: str) -> None:
    answer = json(await client.post(f"{prefix}/ocr/predict?min_rec_score=0.6&shared_client=true", files={"image": SCENE}))

    assert (answer.keys(), answer["status"], answer["error"], answer["truncated"]) == (KEYS, "success", None, False)
    assert (texts(answer), answer["image"]) == ({"r", "b"}, {"width": 200, "height": 100})
    for region in answer["regions"]:
        assert region.keys() == {"text", "box", "box_normalized", "det_score", "rec_score"}
        assert region["rec_score"] == {"r": 0.9, "b": 0.7}[region["text"]]
        assert 0.5 <= region["det_score"] <= 1
        corners = np.array(region["box"]).reshape(4, 2)
        around = np.array([*corners.min(axis=0), *corners.max(axis=0)])
        assert region["box_normalized"] == pytest.approx(around / [*SIZE, *SIZE], abs=1e-5)
        inner = np.array(RECTANGLES["red" if region["text"] == "r" else "blue"])
        assert (around[:2] <= inner[:2] + 2).all()
        assert (around[2:] >= inner[2:] - 2).all()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", {"r"}),
        ("min_rec_score=0.95", set()),
        ("filter_by_score=false&min_rec_score=0.95", {"r", "b"}),
        ("min_rec_score=0&min_det_score=0.5", {"r", "b"}),
    ],
)
async def test_scores_filter_texts(client: httpx.AsyncClient, query: str, found: set[str]) -> None:
    assert texts(json(await client.post(f"/ocr/predict?{query}", content=SCENE))) == found


async def test_bodies_are_those_of_all_routes(client: httpx.AsyncClient) -> None:
    encoded = {"image": base64.b64encode(SCENE).decode(), "min_rec_score": 0.6}
    assert texts(json(await client.post("/ocr/predict", json=encoded))) == {"r", "b"}
    assert texts(json(await client.post("/ocr/predict", files={"file": SCENE}, data={"min_rec_score": "0.95"}))) == set()
    problem = json(await client.post("/ocr/predict?min_rec_scor=0.6", content=SCENE), 400)
    assert "did you mean 'min_rec_score'?" in problem["detail"]
    assert json(await client.post("/ocr/predict", content=b"junk"), 415)["code"] == "unsupported_format"


async def test_no_text_is_an_answer(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/ocr/predict", content=EMPTY))
    assert (texts(answer), answer["full_text"], answer["regions"]) == (set(), "", [])


async def test_steps_are_in_server_timing(client: httpx.AsyncClient) -> None:
    response = await client.post("/ocr/predict", content=SCENE)
    names = [entry.partition(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert [name for name in names if name in {"lines", "direction", "text", "total"}] == ["lines", "direction", "text", "total"]


async def test_images_of_a_batch_fail_alone(client: httpx.AsyncClient) -> None:
    files = [("images", (f"{index}.png", image)) for index, image in enumerate([SCENE, b"junk", EMPTY])]
    answer = json(await client.post("/v1/ocr/batch?min_rec_score=0.6&max_workers=4", files=files))

    assert answer.keys() == BATCH_KEYS | {"total_text_regions", "images_with_text"}
    assert (answer["status"], answer["total_images"], answer["processed_images"], answer["failed_images"]) == ("partial", 3, 2, 1)
    assert (answer["total_text_regions"], answer["images_with_text"]) == (2, 1)
    assert [(result["image_index"], result["filename"], result["num_texts"]) for result in answer["results"]] == [
        (0, "0.png", 2),
        (2, "2.png", 0),
    ]
    for result in answer["results"]:
        assert {"filename", "image_index", "status", "error", "texts", "full_text", "num_texts", "image"} <= result.keys()
        texts(result)
    assert [(failure["filename"], failure["index"]) for failure in answer["failures"]] == [("1.png", 1)]
    assert answer["failures"][0]["error"] == answer["failures"][0]["problem"]["detail"]


async def test_a_batch_holds_so_many_images(client: httpx.AsyncClient) -> None:
    files = [("images", ("a.png", EMPTY))] * 64
    answer = json(await client.post("/ocr/batch", files=files))
    assert (answer["processed_images"], answer["status"], answer["images_with_text"]) == (64, "success", 0)
    assert "64" in json(await client.post("/ocr/batch", files=[*files, files[0]]), 400)["detail"]
