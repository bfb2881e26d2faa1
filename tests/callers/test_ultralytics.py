"""Clients of Ultralytics HUB. hub-sdk has its address in the environment."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.callers.client import run
from tests.callers.conftest import KEY, MODEL
from tests.support import IMAGES, sample_image

PHOTO = IMAGES / "astronaut.jpg"


@pytest.fixture
def hub(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRALYTICS_HUB_API", f"{gateway}/ultralytics")


def predict(key: str = "any", model: str = MODEL, picture: Path = PHOTO, **parameters: float) -> dict[str, Any]:
    answer: dict[str, Any] = run("hub-sdk", "ultralytics_hub", key, model, str(picture), json.dumps(parameters))
    return answer


@pytest.mark.client("hub-sdk")
@pytest.mark.usefixtures("hub")
def test_a_photo(own: httpx.Client) -> None:
    """A model by its name, and a photo with `conf`, `iou` and `imgsz`: the boxes of `/detect`."""
    found = predict(conf=0.1, iou=0.6, imgsz=640)
    expected = own.post("/detect?boxes=pixel&confidence=0.1&iou=0.6", content=sample_image(PHOTO.name)).json()["detections"]
    (image,) = found["answer"]["images"]

    assert len(expected) > 1
    assert found["model"]["id"] == MODEL
    assert [(one["name"], one["confidence"]) for one in image["results"]] == [
        (one["class_name"], pytest.approx(one["confidence"], abs=1e-4)) for one in expected
    ]
    assert [one["box"] for one in image["results"]] == [
        pytest.approx({side: one[side] for side in ("x1", "y1", "x2", "y2")}, abs=0.01) for one in expected
    ]
    assert found["log"] == ""


@pytest.mark.client("hub-sdk")
@pytest.mark.usefixtures("hub")
def test_errors() -> None:
    """An unknown model, a file that is no picture, a bad `conf`: the SDK logs `Resource not found.` or `Bad Request`."""
    unknown, no_picture, bad = predict(model="nothing"), predict(picture=Path(__file__)), predict(conf=2)

    assert [one["answer"] for one in (unknown, no_picture, bad)] == [None] * 3
    assert unknown["log"].splitlines()[-1] == "Resource not found."
    assert no_picture["log"] == bad["log"] == "Bad Request\n"


@pytest.mark.client("hub-sdk")
def test_keys(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API key of the gateway; with a wrong one, the SDK says that it is invalid."""
    monkeypatch.setenv("ULTRALYTICS_HUB_API", f"{locked}/ultralytics")
    right, wrong = predict(KEY), predict("hub.wrong")

    assert right["answer"]["images"][0]["results"]
    assert right["log"] == ""
    assert wrong["answer"] is None
    assert "Invalid API key" in wrong["log"]
