"""Formats of a result: asked for by name or by `Accept`, from the real Triton; and boxes in the unit asked for."""

import base64
from io import BytesIO
from typing import Any, get_args

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.api.answering.format import best, select
from app.api.answering.native import to_detections
from app.api.answering.responses import LargeResponse
from app.api.answering.schema import BoxFormat
from app.api.parameters.tasks import CLASSIFICATIONS
from app.errors import GatewayFull, NotAcceptable
from app.imaging.drawing import colour_of
from app.pipeline.results import Detections
from tests.fakes.triton import SPEC
from tests.support import SCENE, json

PATH = "/predict/six_columns"
LABELLED = msgspec.structs.replace(SPEC, labels=("person", "car", "traffic light"))
TYPES = ("application/json", "image/jpeg", "image/png")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"IMAGE/PNG", "image/png"),
        (b"image/*", "image/jpeg"),
        (b"*/*", "application/json"),
        (b"image/png, image/jpeg", "image/jpeg"),
        (b"image/jpeg; q=0.5 ,image/png;q=0.6", "image/png"),
        (b"image/jpeg;q=0, image/*", "image/png"),
        (b"*/*;q=0.9, image/png;Q=1.000", "image/png"),
        (b"image/png;level=1;q=0.2, */*;q=0.1", "image/png"),
        # What browsers send for a page, and for a picture.
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", "application/json"),
        (b"image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8", "image/jpeg"),
        (b"image/webp, text/html;q=0.5", None),
        (b"*/*;q=0", None),
        # A header without a media type asks for nothing.
        (b"", "application/json"),
        (b"json", "application/json"),
        (b"\xff\xfe", "application/json"),
        # No program needs more than fifty types.
        (b"text/html," * 49 + b"image/png", "image/png"),
        (b"text/html," * 50 + b"image/png", None),
    ],
)
def test_type_with_the_highest_quality_is_chosen(accept: bytes, chosen: str | None) -> None:
    """The most specific range counts; of several with equal quality, the first type that is available (RFC 9110, 12.5.1)."""
    assert best(accept, TYPES) == chosen


@given(st.binary(max_size=200))
def test_any_accept_header_is_read(accept: bytes) -> None:
    assert best(accept, TYPES) in {*TYPES, None}


def test_classes_have_no_picture() -> None:
    assert select(CLASSIFICATIONS, None, b"image/png, application/json;q=0.1").name == "json"
    with pytest.raises(NotAcceptable, match="none of application/json;"):
        select(CLASSIFICATIONS, None, b"image/png")


def assert_framed(picture: bytes, image_format: str, detections: list[dict[str, Any]]) -> None:
    with Image.open(BytesIO(picture)) as image:
        assert image.format == image_format
        pixels = np.asarray(image)
    assert len(detections) == 2
    for detection in detections:
        x1, y1, x2, y2 = (round(detection[name]) for name in ("x1", "y1", "x2", "y2"))
        assert (np.abs(pixels[(y1 + y2) // 2, [x1, x2 - 1]] - np.array(colour_of(detection["class_id"]), int)) < 30).all()


async def test_picture_has_the_boxes_that_were_found(client: httpx.AsyncClient) -> None:
    expected = json(await client.post(PATH, params={"boxes": "pixel"}, content=SCENE))["detections"]
    for query, accept, image_format in (
        ("", "image/png", "PNG"),
        ("", "image/avif,image/webp,image/*,*/*;q=0.8", "JPEG"),
        ("?format=image", "image/png", "PNG"),
        ("?format=image", "application/json", "JPEG"),
    ):
        answer = await client.post(PATH + query, content=SCENE, headers={"Accept": accept})
        headers = {"content-type": f"image/{image_format.lower()}", "vary": "Accept", "content-length": str(len(answer.content))}
        assert {name: answer.headers[name] for name in headers} == headers
        assert " draw;dur=" in answer.headers["server-timing"]
        assert_framed(answer.content, image_format, expected)
    headers = {"Accept": "application/json, image/png;q=0.1"}
    answer = await client.post(f"{PATH}?format=image_and_json&boxes=pixel", content=SCENE, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert json(answer)["detections"] == expected
    assert_framed(base64.b64decode(json(answer)["visualization"], validate=True), "PNG", expected)


async def test_accept_that_allows_no_format_is_told(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is that a picture has no room."""

    async def refuse(*_: object) -> None:
        raise GatewayFull("no room", "memory")

    answer = await client.post(PATH, content=SCENE, headers={"Accept": "image/webp"})
    assert "none of application/json, image/jpeg, image/png;" in json(answer, 406)["detail"]
    monkeypatch.setattr(LargeResponse, "__call__", refuse)
    assert json(await client.post(f"{PATH}?format=image", content=SCENE), 429)["code"] == "gateway_full"


async def test_coco_results_are_what_its_tools_read(client: httpx.AsyncClient) -> None:
    found = json(await client.post(f"{PATH}?format=coco-results&image_id=139", content=SCENE))
    as_json = json(await client.post(f"{PATH}?boxes=coco", content=SCENE))["detections"]

    assert found == [
        {"image_id": 139, "category_id": detection["class_id"], "bbox": detection["bbox"], "score": detection["confidence"]}
        for detection in as_json
    ]
    assert len(found) == 2


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=4), st.integers(1, 16384), st.integers(1, 16384))
def test_all_units_describe_the_same_box(corners: list[list[float]], width: int, height: int) -> None:
    size = np.array([width, height] * 2, np.float32)
    boxes = np.sort(np.array(corners, np.float32).reshape(-1, 2, 2), axis=1).reshape(-1, 4) * size
    nothing = np.zeros(len(boxes))
    found = Detections(boxes, nothing.astype(np.float32), nothing.astype(np.int32), width, height, LABELLED, "7")
    exact = boxes.astype(np.float64)
    start, sides = exact[:, :2], exact[:, 2:] - exact[:, :2]
    expected = {
        "normalized": exact / size,
        "pixel": exact,
        "coco": np.hstack([start, sides]),
        "cxcywh": np.hstack([start + sides / 2, sides]),
    }
    for unit in get_args(BoxFormat):
        digits, most = (6, 1) if unit == "normalized" else (2, size)
        written = msgspec.to_builtins(to_detections(found, unit))
        values = [
            one["bbox"] if unit in {"coco", "cxcywh"} else [one[name] for name in ("x1", "y1", "x2", "y2")] for one in written
        ]
        numbers = np.array(values).reshape(-1, 4)
        np.testing.assert_allclose(numbers, expected[unit], rtol=0, atol=0.5001 * 10**-digits)
        assert (numbers == numbers.round(digits)).all()
        assert ((numbers >= 0) & (numbers <= most)).all()


def test_score_has_four_digits_and_a_class_without_a_label_its_id_as_name() -> None:
    """A model may have more classes than labels, or no labels."""
    scores, ids = np.array([1.0005, 0.123456], np.float32), np.array([2, 3], np.int32)
    found = Detections(np.zeros((2, 4), np.float32), scores, ids, 200, 100, LABELLED, "7")
    written = msgspec.to_builtins(to_detections(found, "normalized"))

    assert [(one["confidence"], one["class_name"]) for one in written] == [(1.0, "traffic light"), (0.1235, "3")]
