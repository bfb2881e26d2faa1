"""POST /predict/{cascade}: detections with what later steps say of them, answered by real models."""

from collections.abc import AsyncIterator

import httpx
import msgspec
import numpy as np
import pytest

from app.cascade import catalog
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import SCENE, json, started

CASCADES = """
[shapes]
title = "Shapes and their colours"
[shapes.steps.shape]
model = "six_columns"
confidence = 0.85
[shapes.steps.colour]
model = "planes_to_logits"
of = "shape"
[shapes.steps.vector]
model = "embedding"
of = "shape"
classes = ["blue"]
[shapes.steps.part]
model = "six_columns:1"
of = "shape"
[shapes.steps.hue]
model = "planes_to_logits"
of = "part"
top_k = 2
[shapes.steps.mood]
model = "planes_to_logits"
[shapes.steps.broken]
model = "lying"
of = "shape"
max_crops = 1

[sorted.steps.kind]
model = "planes_to_logits"

[lost.steps.shape]
model = "six_rows"
"""
ALL = "/predict/shapes?confidence=0.5"


@pytest.fixture(scope="module")
async def client(
    settings: Settings, triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    assert triton.poll() is None
    repository = tmp_path_factory.mktemp("cascades")
    (repository / catalog.FILE).write_text(CASCADES)
    own = msgspec.structs.replace(
        settings, model_repository=str(repository), model="six_columns", triton_endpoints=settings.triton_address
    )
    async with started(create_app(own)) as client:
        yield client


async def test_object_has_what_each_later_step_says_of_it(client: httpx.AsyncClient) -> None:
    response = await client.post(f"{ALL}&boxes=pixel", content=SCENE)
    answer = json(response)
    red, blue = answer["detections"]

    assert [(each["class_name"], each["colour"]["class_name"]) for each in (red, blue)] == [("red", "red"), ("blue", "blue")]
    assert np.linalg.norm(blue["vector"]) == pytest.approx(1)
    assert "vector" not in red
    (part,) = red["part"]
    corners = "x1", "y1", "x2", "y2"
    assert [part[corner] for corner in corners] == pytest.approx([red[corner] for corner in corners], abs=3)
    assert (part["hue"]["class_name"], len(part["hue"]["classifications"])) == ("red", 2)
    assert answer["mood"]["class_name"] == "red"
    assert [(step, error["code"]) for step, error in answer["errors"].items()] == [("broken", "invalid_model_output")]
    assert (answer["truncated"], answer["num_detections"], answer["model"]["name"]) == (True, 2, "six_columns")
    stages = {entry.partition(";")[0].strip() for entry in response.headers["server-timing"].split(",")}
    assert {"shape", "colour", "mood"} <= stages


async def test_parameters_are_those_of_the_first_model_with_the_confidence_of_the_step(client: httpx.AsyncClient) -> None:
    (only,) = json(await client.post("/predict/shapes", content=SCENE))["detections"]

    assert only["class_name"] == "red"
    assert json(await client.post(f"{ALL}&classes=blue", content=SCENE))["num_detections"] == 1
    assert "green" in json(await client.post(f"{ALL}&classes=green", content=SCENE), 400)["detail"]
    assert "top_k" in json(await client.post(f"{ALL}&top_k=2", content=SCENE), 400)["detail"]
    assert [each["category_id"] for each in json(await client.post(f"{ALL}&format=coco-results", content=SCENE))] == [0, 1]


async def test_invalid_request_of_a_cascade_is_rejected_with_its_reason(client: httpx.AsyncClient) -> None:
    for path, status, said in (
        ("/predict/sorted", 400, "planes_to_logits, the first model of the cascade, is a classifier, which finds no boxes"),
        ("/predict/lost", 404, "six_rows, the first model of the cascade: there is no such model"),
        ("/predict/ocr", 404, "there is no such model"),
    ):
        assert said in json(await client.post(path, content=SCENE), status)["detail"]
