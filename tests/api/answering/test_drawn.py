"""Drawn pictures through HTTP, from the real Triton: asked for by name or by `Accept`, alone or in JSON."""

import base64
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.api.answering.responses import LargeResponse
from app.errors import GatewayFull
from app.imaging.drawing import colour_of
from tests.support import SCENE, json

PATH = "/predict/six_columns"


def pixels_of(picture: bytes, image_format: str) -> NDArray[np.uint8]:
    with Image.open(BytesIO(picture)) as image:
        assert image.format == image_format
        return np.asarray(image)


def assert_framed(pixels: NDArray[np.uint8], detections: list[dict[str, Any]]) -> None:
    for detection in detections:
        x1, y1, x2, y2 = (round(detection[name]) for name in ("x1", "y1", "x2", "y2"))
        assert (np.abs(pixels[(y1 + y2) // 2, [x1, x2 - 1]] - np.array(colour_of(detection["class_id"]), int)) < 30).all()


@pytest.fixture(scope="module")
async def expected(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json(await client.post(PATH, params={"boxes": "pixel"}, content=SCENE))["detections"]
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("query", "accept", "image_format"),
    [
        ("", "image/jpeg", "JPEG"),
        ("", "image/png", "PNG"),
        ("", "image/avif,image/webp,image/*,*/*;q=0.8", "JPEG"),
        ("?format=image", "*/*", "JPEG"),
        ("?format=image", "image/png", "PNG"),
        ("?format=image", "application/json", "JPEG"),
    ],
)
async def test_the_picture_has_the_boxes_that_were_found(
    client: httpx.AsyncClient, expected: list[dict[str, Any]], query: str, accept: str, image_format: str
) -> None:
    answer = await client.post(PATH + query, content=SCENE, headers={"Accept": accept})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"image/{image_format.lower()}"
    assert answer.headers["vary"] == "Accept"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert " draw;dur=" in answer.headers["server-timing"]
    assert_framed(pixels_of(answer.content, image_format), expected)


@pytest.mark.parametrize(("accept", "image_format"), [("*/*", "JPEG"), ("application/json, image/png;q=0.1", "PNG")])
async def test_json_can_have_the_picture_too(
    client: httpx.AsyncClient, expected: list[dict[str, Any]], accept: str, image_format: str
) -> None:
    query = {"format": "image_and_json", "boxes": "pixel"}
    answer = await client.post(PATH, params=query, content=SCENE, headers={"Accept": accept})
    found = json(answer)

    assert answer.headers["content-type"] == "application/json"
    assert found["detections"] == expected
    assert_framed(pixels_of(base64.b64decode(found["visualization"], validate=True), image_format), expected)


async def test_a_picture_that_has_no_room_is_rejected(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise GatewayFull("no room", "memory")

    monkeypatch.setattr(LargeResponse, "__call__", refuse)
    answer = await client.post(f"{PATH}?format=image", content=SCENE)

    assert (answer.status_code, answer.json()["code"]) == (429, "gateway_full")
