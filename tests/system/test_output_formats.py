"""Models of every tensor format that users bring, each a real one in Triton."""

import httpx
import pytest

from tests.fakes import models
from tests.support import NEEDS_BYTES, SCENE, json

# The rectangles lie between pixels of the canvas, which is 0.64 of the scene.
NEAR = 2.0


@pytest.mark.parametrize(
    "model",
    [
        *("six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head"),
        *("stretched_columns", "unbatched", "extra_string"),
        pytest.param("file_in", marks=NEEDS_BYTES),
    ],
)
async def test_each_format_finds_the_rectangles(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post(f"/predict/{model}?boxes=pixel", content=SCENE)

    detections = json(response)["detections"]
    assert [found["class_name"] for found in detections] == ["red", "blue"]
    for found in detections:
        corners = [found[key] for key in ("x1", "y1", "x2", "y2")]
        assert corners == pytest.approx(models.RECTANGLES[found["class_name"]], abs=NEAR)


@pytest.mark.parametrize("model", ["yolo_head", "yolox_head"])
async def test_a_raw_head_takes_the_overlap_of_the_caller(client: httpx.AsyncClient, model: str) -> None:
    counts = []
    for iou in ("1", "0.99", "0"):
        response = await client.post(f"/predict/{model}?iou={iou}&max_detections=300", content=SCENE)
        counts.append(json(response)["num_detections"])

    assert counts[0] > 100
    assert counts[1:] == [2, 2]


@NEEDS_BYTES
async def test_a_model_that_fails_on_the_file_is_a_bad_gateway(client: httpx.AsyncClient) -> None:
    """It decodes by itself and cannot (this one reads BMP only): not the caller's fault, and its message is not passed on."""
    response = await client.post("/predict/file_in", content=models.scene("PNG"))

    problem = json(response, 502)
    assert problem["code"] == "inference_failed"
    assert problem["detail"] == "Triton reported an error of the model"


async def test_the_header_is_checked_before_a_file_is_passed_on(client: httpx.AsyncClient) -> None:
    response = await client.post("/predict/file_in", content=b"GIF, not really")

    assert json(response, 415)["code"] == "unsupported_format"
