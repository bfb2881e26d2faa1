"""Models of every layout that users bring, each a real one in Triton."""

import httpx
import pytest

from tests import layouts
from tests.conftest import json

# The rectangles lie between pixels of the frame, which is 0.64 of the scene.
NEAR = 2.0


@pytest.mark.parametrize(
    "model", ["six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head", "unbatched", "file_in"]
)
async def test_each_layout_finds_the_rectangles(client: httpx.AsyncClient, model: str) -> None:
    """Channels, scale, placement, units and suppression are right for the layout, by its config alone."""
    response = await client.post(f"/predict/{model}?boxes=pixel", content=layouts.scene("BMP"))

    detections = json(response)["detections"]
    assert [found["class_name"] for found in detections] == ["red", "blue"]
    for found in detections:
        corners = [found[key] for key in ("x1", "y1", "x2", "y2")]
        assert corners == pytest.approx(layouts.RECTANGLES[found["class_name"]], abs=NEAR)


async def test_a_model_that_fails_on_the_file_is_a_bad_gateway(client: httpx.AsyncClient) -> None:
    """A model that decodes by itself and cannot (this one reads BMP only) is not the caller's fault, and nothing leaks."""
    response = await client.post("/predict/file_in", content=layouts.scene("PNG"))

    problem = json(response, 502)
    assert problem["code"] == "model_nonsense"
    assert problem["detail"] == "the model could not be run"


async def test_the_header_is_checked_before_a_file_is_passed_on(client: httpx.AsyncClient) -> None:
    """What is no picture never reaches a model that takes files."""
    response = await client.post("/predict/file_in", content=b"GIF, not really")

    assert json(response, 415)["code"] == "unsupported_format"
