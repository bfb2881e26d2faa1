"""Classifiers of the layouts and types that users bring, each a real one in Triton; their answers are computed by hand."""

import math
from io import BytesIO
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.embedded.server import check_inference
from app.main import create_app
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from tests.fakes import classifiers
from tests.fakes.classifiers import CLASSIFIERS, LABELS, MEAN, STD, logits_of, softmax
from tests.support import SCENE, json, started

# Of the middle, and of both ends.
MIDDLE, ENDS = (204, 51, 102), (51, 153, 0)
INNER, OUTER = ((0.8, 0.2, 0.4), (0.2, 0.6, 0.0))


def striped(middle: tuple[int, int, int] = MIDDLE, width: int = 256) -> bytes:
    """Make an image of twice its height, whose middle, a square, has another colour than its ends."""
    height = width // 2
    image = Image.new("RGB", (width, height), ENDS)
    image.paste(middle, (height // 2, 0, height // 2 + height, height))
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def mixed(*parts: tuple[float, tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mix colours by their shares."""
    red, green, blue = (sum(share * colour[index] for share, colour in parts) for index in range(3))
    return red, green, blue


def by_name(response: httpx.Response) -> dict[str, float]:
    return {one["class_name"]: one["confidence"] for one in json(response)["classifications"]}


HALVES = mixed((0.5, INNER), (0.5, OUTER))
EXPECTED = {
    "planes_to_logits": logits_of(INNER),
    "bytes_to_logits": logits_of(INNER),
    "half_to_half": logits_of(INNER),
    "probabilities": logits_of(INNER),
    "cropped": logits_of(INNER),
    "stretched": logits_of(HALVES),
    "letterboxed": logits_of(mixed((0.5, HALVES), (0.5, (0.0, 0.0, 0.0)))),
    # The channels are blue, green and red, and so are the means and deviations.
    "normalized": classifiers.WEIGHTS
    @ np.array([(value - mean) / std for value, mean, std in zip(INNER[::-1], MEAN, STD, strict=True)], np.float32),
}


@pytest.mark.parametrize("model", EXPECTED)
async def test_each_classifier_gives_the_probabilities_computed_by_hand(client: httpx.AsyncClient, model: str) -> None:
    found = by_name(await client.post(f"/classify?model={model}", content=striped()))

    expected = dict(zip(LABELS, softmax(EXPECTED[model]), strict=True))
    assert found == pytest.approx(expected, abs=0.01)
    assert list(found) == sorted(found, key=lambda name: -found[name])


async def test_the_answer_has_the_members_of_the_contract(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/classify?model=planes_to_logits&top_k=1", content=striped()))

    assert answer["classifications"] == [
        {"class": 0, "class_id": 0, "class_name": "red", "confidence": answer["classifications"][0]["confidence"]}
    ]
    assert (answer["num_classifications"], answer["status"]) == (1, "success")
    assert answer["image"] == {"width": 256, "height": 128}
    assert answer["model"] == {"name": "planes_to_logits", "version": "1", "backend": "triton", "device": "cpu"}
    assert answer["total_time_ms"] > 0
    assert answer["request_id"]


async def test_the_caller_chooses_how_many_and_how_sure(client: httpx.AsyncClient) -> None:
    path = "/classify?model=planes_to_logits"
    sure, *_, unsure = by_name(await client.post(path, content=striped())).values()
    in_form = await client.post(path, files={"image": striped()}, data={"top_k": "2"})
    in_query = await client.post(f"{path}&confidence={unsure + 0.001}", content=striped())

    assert len(by_name(in_form)) == 2
    assert len(by_name(in_query)) == 3
    assert by_name(await client.post(f"{path}&confidence={sure + 0.01}", content=striped())) == {}


async def test_a_model_in_the_path_answers_by_its_own_task(client: httpx.AsyncClient) -> None:
    classified = json(await client.post("/predict/planes_to_logits?top_k=2", content=striped()))
    detected = json(await client.post("/predict/six_columns?max_detections=1", content=SCENE))

    assert (classified["num_classifications"], detected["num_detections"]) == (2, 1)
    assert "detections" not in classified
    for path in ("/predict/planes_to_logits", "/predict/six_columns", "/classify?model=planes_to_logits"):
        as_json = await client.post(path, params={"format": "json"}, content=SCENE, headers={"Accept": "image/png"})
        assert json(as_json)["status"] == "success"
    for path in ("/predict/planes_to_logits?max_detections=1", "/predict/six_columns?top_k=1", "/classify?boxes=pixel"):
        problem = json(await client.post(path, content=SCENE), 400)
        assert (problem["code"], "unknown parameter" in problem["detail"]) == ("invalid_parameter", True)


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/detect?model=stretched", "stretched is a classifier, not a detector; POST /classify or /predict/stretched asks it"),
        (
            "/classify?model=six_columns",
            "six_columns is a detector, not a classifier; POST /detect or /predict/six_columns asks it",
        ),
    ],
)
async def test_a_model_of_another_task_says_where_it_is_asked(client: httpx.AsyncClient, path: str, detail: str) -> None:
    problem = json(await client.post(path, content=SCENE), 400)

    assert (problem["code"], problem["detail"]) == ("wrong_task", detail)


async def test_a_model_without_batches_and_names(client: httpx.AsyncClient) -> None:
    found = by_name(await client.post("/predict/single", content=striped()))

    assert found == pytest.approx(dict(zip("0123", softmax(logits_of(INNER)), strict=True)), abs=0.01)


async def test_the_list_of_models_tells_the_task(client: httpx.AsyncClient) -> None:
    listed: dict[str, Any] = {model["name"]: model for model in json(await client.get("/models"))["models"]}

    assert {name: listed[name]["task"] for name in (*CLASSIFIERS, "six_columns")} == {
        **dict.fromkeys(CLASSIFIERS, "classification"),
        "six_columns": "detection",
    }
    assert listed["probabilities"]["output_format"] == "probabilities of 4 classes"
    assert (listed["stretched"]["width"], listed["stretched"]["classes"]) == (32, list(LABELS))


def test_the_check_of_a_start_runs_a_classifier(settings: Settings, triton: object) -> None:
    """`serve` checks the default model in the same way."""
    assert triton is not None
    check_inference(BlockingClient(settings.triton_address), "bytes_to_logits", seconds=30)


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ({"model": "planes_to_logits"}, "/classify?model=planes_to_logits"),
        ({"task_models": "classification=planes_to_logits"}, "/classify"),
    ],
)
async def test_a_classifier_may_be_a_default_model(settings: Settings, triton: object, setting: dict[str, str], path: str) -> None:
    assert triton is not None
    async with started(create_app(msgspec.structs.replace(settings, **setting))) as client:
        answer = json(await client.post(path, content=striped()))
        ready = await client.get("/readyz")

    assert answer["model"]["name"] == "planes_to_logits"
    assert math.isclose(sum(one["confidence"] for one in answer["classifications"]), 1, abs_tol=0.001)
    assert ready.status_code == 200
