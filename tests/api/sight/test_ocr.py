"""POST /ocr/predict and /ocr/batch: the text that three models find, straighten and read."""

from base64 import b64encode
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.models import RECTANGLES, SIZE, scene
from tests.support import SCENE, json

EMPTY = scene("PNG", shift=500)
KEYS = {"status", "texts", "regions", "full_text", "num_texts", "image", "error", "truncated", "total_time_ms", "request_id"}


def texts(answer: dict[str, Any]) -> set[str]:
    assert answer["num_texts"] == len(answer["texts"]) == len(answer["regions"])
    assert answer["texts"] == [region["text"] for region in answer["regions"]]
    assert answer["full_text"] == "\n".join(answer["texts"])
    return set(answer["texts"])


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_has_its_place_and_its_scores(client: httpx.AsyncClient, prefix: str) -> None:
    response = await client.post(f"{prefix}/ocr/predict?min_rec_score=0.6&shared_client=true", files={"image": SCENE})
    answer = json(response)

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
    names = [entry.partition(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert [name for name in names if name in {"lines", "direction", "text", "total"}] == ["lines", "direction", "text", "total"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"content": SCENE}, {"r"}),
        ({"content": EMPTY}, set()),
        ({"content": SCENE, "params": {"min_rec_score": 0.95}}, set()),
        ({"content": SCENE, "params": {"filter_by_score": "false", "min_rec_score": 0.95}}, {"r", "b"}),
        ({"content": SCENE, "params": {"min_rec_score": 0, "min_det_score": 0.5}}, {"r", "b"}),
        ({"json": {"image": b64encode(SCENE).decode(), "min_rec_score": 0.6}}, {"r", "b"}),
        ({"files": {"file": SCENE}, "data": {"min_rec_score": "0.95"}}, set()),
    ],
)
async def test_scores_filter_texts(client: httpx.AsyncClient, given: dict[str, Any], found: set[str]) -> None:
    assert texts(json(await client.post("/ocr/predict", **given))) == found


async def test_misspelt_parameter_or_junk_is_refused(client: httpx.AsyncClient) -> None:
    problem = json(await client.post("/ocr/predict?min_rec_scor=0.6", content=SCENE), 400)
    assert "did you mean 'min_rec_score'?" in problem["detail"]
    assert json(await client.post("/ocr/predict", content=b"junk"), 415)["code"] == "unsupported_format"


async def test_images_of_a_batch_fail_alone(client: httpx.AsyncClient) -> None:
    files = [("images", (f"{index}.png", image)) for index, image in enumerate([SCENE, b"junk", EMPTY])]
    answer = json(await client.post("/v1/ocr/batch?max_workers=4", files=files))

    assert (answer["status"], answer["total_images"], answer["processed_images"], answer["failed_images"]) == ("partial", 3, 2, 1)
    assert (answer["total_text_regions"], answer["images_with_text"]) == (1, 1)
    described = [(result["image_index"], result["filename"], result["num_texts"]) for result in answer["results"]]
    assert described == [(0, "0.png", 1), (2, "2.png", 0)]
    for result in answer["results"]:
        assert result.keys() >= {"status", "error", "image"}
        texts(result)
    assert [(failure["filename"], failure["index"]) for failure in answer["failures"]] == [("1.png", 1)]
    assert answer["failures"][0]["error"] == answer["failures"][0]["problem"]["detail"]
    assert "64" in json(await client.post("/ocr/batch", files=[("images", ("a.png", EMPTY))] * 65), 400)["detail"]
