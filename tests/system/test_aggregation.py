"""Images that share a call to a real Triton: each gets its own answer, also beside one that the model cannot stand."""

import asyncio
from collections.abc import AsyncIterator
from itertools import cycle

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_metrics

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.fakes import models
from tests.support import NEEDS_BYTES, SCENE, json, started

MODELS = [
    *("six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head", "unbatched"),
    pytest.param("file_in", marks=NEEDS_BYTES),
]
BLACK, GREEN = models.scene("BMP", "black"), models.scene("BMP", "lime")
REQUESTS = 24


@pytest.fixture(params=["shm", "inline"])
async def one_by_one(
    settings: Settings, triton: EmbeddedTriton, request: pytest.FixtureRequest
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that makes one call at a time, so that much is aggregated."""
    assert triton.poll() is None
    own = msgspec.structs.replace(settings, calls_in_flight=1, transport=request.param, decode_threads=4)
    async with started(create_app(own)) as client:
        yield client


async def batch_sizes(client: httpx.AsyncClient, model: str) -> tuple[float, float]:
    """Return how many images and how many calls there have been for a model."""
    text = (await client.get("/metrics")).text
    samples = {
        sample.name.removeprefix("api_inference_batch_size_"): sample.value
        for family in parse_metrics(text)
        if family.name == "api_inference_batch_size"
        for sample in family.samples
        if sample.labels["model"] == model
    }
    return samples.get("sum", 0), samples.get("count", 0)


@pytest.mark.parametrize("model", MODELS)
async def test_each_image_of_a_call_gets_its_own_answer(one_by_one: httpx.AsyncClient, model: str) -> None:
    """Only models without a batch dimension are asked one by one."""
    images, calls = await batch_sizes(one_by_one, model)
    scenes = {shift: models.scene("BMP", shift=shift) for shift in (-16, -8, 0, 8, 16)}
    shifts = [shift for _, shift in zip(range(REQUESTS), cycle(scenes), strict=False)]
    asking = [one_by_one.post(f"/predict/{model}?boxes=pixel", content=scenes[shift]) for shift in shifts]
    responses = await asyncio.gather(*asking)

    for shift, response in zip(shifts, responses, strict=True):
        found = {detection["class_name"]: detection["x1"] for detection in json(response)["detections"]}
        assert found == pytest.approx({name: x1 + shift for name, (x1, *_) in models.RECTANGLES.items()}, abs=2)
    images, calls = (now - before for now, before in zip(await batch_sizes(one_by_one, model), (images, calls), strict=True))
    assert images == REQUESTS
    assert (calls == REQUESTS) is (model in {"unbatched", "file_in"})
    assert any('batch;desc="1"' not in response.headers["server-timing"] for response in responses) is (calls < REQUESTS)


async def check_poison(client: httpx.AsyncClient, poison: bytes, code: str) -> None:
    """Ask for many pictures at once, some of which the model cannot stand."""
    pictures = [poison if index % 6 == 3 else SCENE for index in range(REQUESTS)]
    responses = await asyncio.gather(*(client.post("/predict/fragile", content=picture) for picture in pictures))

    for picture, response in zip(pictures, responses, strict=True):
        if picture is poison:
            assert json(response, 502)["code"] == code
        else:
            assert [found["class_name"] for found in json(response)["detections"]] == ["red", "blue"]


POISON = pytest.mark.parametrize(
    ("poison", "code"), [pytest.param(BLACK, "inference_failed", id="fails"), pytest.param(GREEN, "invalid_model_output", id="nan")]
)


@POISON
async def test_a_poison_picture_costs_nobody_else(one_by_one: httpx.AsyncClient, poison: bytes, code: str) -> None:
    await check_poison(one_by_one, poison, code)

    images, calls = await batch_sizes(one_by_one, "fragile")
    assert calls < images


@POISON
async def test_a_poison_picture_costs_nobody_else_where_triton_makes_the_batches(
    settings: Settings, triton: EmbeddedTriton, poison: bytes, code: str
) -> None:
    """The embedded Triton's ONNX backend runs the requests of a failed batch one by one."""
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, calls_in_flight=4096))) as client:
        await check_poison(client, poison, code)


async def test_without_aggregation_each_image_goes_alone(settings: Settings, triton: EmbeddedTriton) -> None:
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, calls_in_flight=4096))) as client:
        before = await batch_sizes(client, "six_columns")
        responses = await asyncio.gather(*(client.post("/predict/six_columns", content=SCENE) for _ in range(REQUESTS)))
        after = await batch_sizes(client, "six_columns")

    assert all('batch;desc="1"' in response.headers["server-timing"] for response in responses)
    assert [now - then for now, then in zip(after, before, strict=True)] == [REQUESTS, REQUESTS]
