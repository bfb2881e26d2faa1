"""Models of every tensor format that users bring, each a real one in Triton."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from app.detection.outputs import decode_outputs
from app.detection.select import select, to_suppression
from app.embedded.server import EmbeddedTriton
from app.model.heads import DetectionHead
from app.resilience.lease import Lease
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from app.triton.transport import Mode
from tests.fakes import models
from tests.support import NEEDS_BYTES, SCENE, fill, json, transport_to

BATCHED = ["six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head"]
# The rectangles lie between pixels of the canvas, which is 0.64 of the scene.
NEAR = 2.0


@pytest.mark.parametrize(
    "model", [*BATCHED, "stretched_columns", "unbatched", "extra_string", pytest.param("file_in", marks=NEEDS_BYTES)]
)
async def test_each_format_finds_the_rectangles(client: httpx.AsyncClient, model: str) -> None:
    """Channels, scale, placement, units and suppression are right for the format, by the model's config alone."""
    response = await client.post(f"/predict/{model}?boxes=pixel", content=SCENE)

    detections = json(response)["detections"]
    assert [found["class_name"] for found in detections] == ["red", "blue"]
    for found in detections:
        corners = [found[key] for key in ("x1", "y1", "x2", "y2")]
        assert corners == pytest.approx(models.RECTANGLES[found["class_name"]], abs=NEAR)


@pytest.mark.parametrize("model", ["yolo_head", "yolox_head"])
async def test_a_raw_head_takes_the_overlap_of_the_caller(client: httpx.AsyncClient, model: str) -> None:
    """It finds each rectangle many times: up to an overlap of 1 all copies are returned, and otherwise only the best."""
    counts = []
    for iou in ("1", "0.99", "0"):
        response = await client.post(f"/predict/{model}?iou={iou}&max_detections=300", content=SCENE)
        counts.append(json(response)["num_detections"])

    assert counts[0] > 100
    assert counts[1:] == [2, 2]


@pytest.mark.parametrize(("model", "maximum"), [("half_four_tensors", 0.7), ("six_columns", 1), ("yolo_head", 1)])
async def test_the_overlap_has_the_maximum_of_the_model(client: httpx.AsyncClient, model: str, maximum: float) -> None:
    """A model that suppresses boxes itself cannot be asked for more than it returns; any can be asked for less."""
    for iou in (0, maximum):
        assert json(await client.post(f"/predict/{model}?iou={iou}&agnostic=true", content=SCENE))["num_detections"] >= 2
    response = await client.post(f"/predict/{model}?iou={maximum + 0.1}", content=SCENE)

    assert json(response, 400)["detail"].startswith("iou: ")
    assert f"{maximum:g}" in json(response, 400)["detail"]


async def test_a_string_output_that_is_not_needed_does_no_harm(client: httpx.AsyncClient) -> None:
    """The gateway does not request it, and the ONNX backend neither converts nor returns it, not even in a batch."""
    responses = await asyncio.gather(*(client.post("/predict/extra_string", content=SCENE) for _ in range(8)))

    for response in responses:
        assert [found["class_name"] for found in json(response)["detections"]] == ["red", "blue"]


@pytest.fixture
async def triton_client(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[TritonClient]:
    """A client of the real Triton."""
    assert triton.poll() is None
    client = TritonClient(settings.triton_address)
    yield client
    await client.close()


@pytest.mark.parametrize("mode", ["shm", "inline"])
@pytest.mark.parametrize("model", BATCHED)
async def test_several_images_in_one_inference_keep_their_own_detections(
    triton_client: TritonClient, model: str, mode: Mode
) -> None:
    """A batch is the images one after the other, in one slot or inline; the middle one is turned upside down."""
    turned = BytesIO()
    Image.open(BytesIO(SCENE)).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(turned, "BMP")
    upright = list(models.RECTANGLES.values())
    upside_down = [(x1, 100 - y2, x2, 100 - y1) for x1, y1, x2, y2 in upright]
    spec = await SpecCache(triton_client).get(model)
    assert spec.dtype is not None
    transport = transport_to(triton_client, mode)
    await transport.prepare(3 * spec.image_bytes)
    transforms = []
    with Lease() as lease:
        batch, slot = transport.allocate(spec.batch_shape(3), spec.dtype, 3 * spec.image_bytes, lease)
        for index, file in enumerate((SCENE, turned.getvalue(), SCENE)):
            single, transform = fill(file, spec, transport_to(triton_client, "inline"), lease)
            transforms.append(transform)
            batch[index] = single.tensor
        assert (slot is not None) is (mode == "shm")
        answer = await triton_client.infer(spec, list(batch), timeout_seconds=30, slot=slot)
    await transport.close()

    parts = answer.split(spec, 3)
    for part, transform, expected in zip(parts, transforms, (upright, upside_down, upright), strict=True):
        suppression = to_suppression(None, spec.expect_head(DetectionHead), is_agnostic=False)
        found = select(decode_outputs(spec, part.outputs), confidence=0.25, class_ids=None, suppression=suppression)
        assert found.class_ids.tolist() == [0, 1]
        np.testing.assert_allclose(transform.to_image(found.boxes), expected, atol=NEAR)


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
