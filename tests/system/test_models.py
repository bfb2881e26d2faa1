"""Detectors and classifiers of every format that users bring, each a real one in Triton: alone, and in calls that images share."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from itertools import cycle, islice

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.main import create_app
from app.settings.schema import Settings
from tests.fakes import models
from tests.fakes.other_tasks import LABELS, MEAN, STD, WEIGHTS, logits_of, softmax
from tests.support import NEEDS_BYTES, SCENE, json, scrape, started

DETECTORS = [
    *("six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head", "stretched_columns", "unbatched"),
    *("extra_string", pytest.param("file_in", marks=NEEDS_BYTES)),
]
REQUESTS = 24
SCORES = {"1": [0.9, 0.8], "2": [0.6, 0.5]}
"""Of the versions of `two_versions`."""

# Of an image whose middle, a square, has another colour than its ends.
MIDDLE, ENDS = (204, 51, 102), (51, 153, 0)
INNER, OUTER = (0.8, 0.2, 0.4), (0.2, 0.6, 0.0)
HALVES = (0.5, 0.4, 0.2)
LOGITS = {
    **dict.fromkeys(("planes_to_logits", "bytes_to_logits", "half_to_half", "probabilities", "cropped"), logits_of(INNER)),
    "stretched": logits_of(HALVES),
    "letterboxed": logits_of((0.25, 0.2, 0.1)),
    # The channels are blue, green and red, and so are the means and deviations.
    "normalized": WEIGHTS
    @ np.array([(value - mean) / std for value, mean, std in zip(INNER[::-1], MEAN, STD, strict=True)], np.float32),
}


@pytest.fixture(params=["shm", "inline"])
async def one_by_one(served: Settings, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that makes one call at a time, so that much is aggregated."""
    own = msgspec.structs.replace(served, calls_in_flight=1, transport=request.param, decode_threads=4)
    async with started(create_app(own)) as client:
        yield client


@pytest.mark.parametrize("model", DETECTORS)
async def test_each_image_of_a_call_gets_the_boxes_of_its_rectangles(one_by_one: httpx.AsyncClient, model: str) -> None:
    """Only models without a batch dimension are asked one by one. The rectangles lie between pixels of the canvas."""
    shifts = list(islice(cycle((-16, -8, 0, 8, 16)), REQUESTS))
    asking = [one_by_one.post(f"/predict/{model}?boxes=pixel", content=models.scene("BMP", shift=shift)) for shift in shifts]
    responses = await asyncio.gather(*asking)

    for shift, response in zip(shifts, responses, strict=True):
        found = json(response)["detections"]
        assert [one["class_name"] for one in found] == ["red", "blue"]
        for one in found:
            x1, y1, x2, y2 = models.RECTANGLES[one["class_name"]]
            corners = [one[key] for key in ("x1", "y1", "x2", "y2")]
            assert corners == pytest.approx([x1 + shift, y1, x2 + shift, y2], abs=2)
    samples = await scrape(one_by_one)
    assert samples[f'api_inference_batch_size_sum{{model="{model}"}}'] == REQUESTS
    calls = samples[f'api_inference_batch_size_count{{model="{model}"}}']
    assert (calls == REQUESTS) is (model in {"unbatched", "file_in"})


@pytest.mark.parametrize(("colour", "code"), [("black", "inference_failed"), ("lime", "invalid_model_output")])
@pytest.mark.parametrize("calls", [1, 4096], ids=["gateway's batches", "Triton's batches"])
async def test_a_poison_picture_costs_nobody_else(served: Settings, colour: str, code: str, calls: int) -> None:
    """The embedded Triton's ONNX backend runs the requests of a failed batch one by one, too."""
    poison = models.scene("BMP", colour)
    pictures = [poison if index % 6 == 3 else SCENE for index in range(REQUESTS)]
    async with started(create_app(msgspec.structs.replace(served, calls_in_flight=calls))) as client:
        responses = await asyncio.gather(*(client.post("/predict/fragile", content=picture) for picture in pictures))

    for picture, response in zip(pictures, responses, strict=True):
        if picture is poison:
            assert json(response, 502)["code"] == code
        else:
            assert [found["class_name"] for found in json(response)["detections"]] == ["red", "blue"]


@pytest.mark.parametrize("model", ["yolo_head", "yolox_head"])
async def test_a_raw_head_takes_the_overlap_of_the_caller(client: httpx.AsyncClient, model: str) -> None:
    counts = []
    for iou in ("1", "0.99", "0"):
        response = await client.post(f"/predict/{model}?iou={iou}&max_detections=300", content=SCENE)
        counts.append(json(response)["num_detections"])

    assert counts[0] > 100
    assert counts[1:] == [2, 2]


@pytest.mark.parametrize("model", LOGITS)
async def test_each_classifier_gives_the_probabilities_computed_by_hand(client: httpx.AsyncClient, model: str) -> None:
    image, file = Image.new("RGB", (256, 128), ENDS), BytesIO()
    image.paste(MIDDLE, (64, 0, 192, 128))
    image.save(file, "PNG")
    answer = json(await client.post(f"/classify?model={model}", content=file.getvalue()))
    found = {one["class_name"]: one["confidence"] for one in answer["classifications"]}

    assert found == pytest.approx(dict(zip(LABELS, softmax(LOGITS[model]), strict=True)), abs=0.01)
    assert list(found) == sorted(found, key=lambda name: -found[name])


async def test_a_call_never_has_images_for_several_versions(one_by_one: httpx.AsyncClient) -> None:
    """The newest version is one model, with or without its number, once it is known."""
    json(await one_by_one.post("/predict/two_versions", content=SCENE))
    queries = list(islice(cycle(["", "?version=1", "?version=2"]), REQUESTS))
    responses = await asyncio.gather(*(one_by_one.post(f"/predict/two_versions{query}", content=SCENE) for query in queries))

    for query, response in zip(queries, responses, strict=True):
        answer = json(response)
        version = query.partition("=")[2] or "2"
        assert answer["model"]["version"] == version
        assert [found["confidence"] for found in answer["detections"]] == SCORES[version]
    samples = await scrape(one_by_one)
    assert any('batch;desc="1"' not in response.headers["server-timing"] for response in responses)
    assert not [name for name in samples if "two_versions:2" in name]
