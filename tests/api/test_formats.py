"""Formats of a result, boxes in the unit asked for, and large responses, whose memory is counted."""

import asyncio
import base64
from io import BytesIO
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image

from app.api.answering.format import best
from app.api.answering.native import to_detections
from app.api.answering.responses import LargeResponse
from app.api.context import PAUSE_SECONDS, BodyLimits, RequestContext
from app.imaging.drawing import colour_of
from app.pipeline.results import Detections
from app.resilience.memory import MemoryBudget
from app.resilience.worker_table import WorkerTable
from tests.api.virtual_time import in_virtual_time, now
from tests.fakes.triton import SPEC
from tests.support import SCENE, json, receiving

PATH = "/predict/six_columns"
LABELLED = msgspec.structs.replace(SPEC, labels=("person", "car", "traffic light"))
TYPES = ("application/json", "image/jpeg", "image/png")


def test_type_with_the_highest_quality_is_chosen() -> None:
    """The most specific range counts; of several with equal quality, the first type that is available (RFC 9110, 12.5.1)."""
    browser = b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
    for accept, chosen in (
        (b"image/*", "image/jpeg"),
        (b"*/*", "application/json"),
        (b"image/jpeg; q=0.5 ,image/png;q=0.6", "image/png"),
        (b"image/jpeg;q=0, image/*", "image/png"),
        (b"*/*;q=0.9, image/png;Q=1.000", "image/png"),
        (browser, "application/json"),
        (b"image/webp, text/html;q=0.5", None),
        (b"\xff\xfe", "application/json"),  # a header without a media type asks for nothing
        (b"text/html," * 50 + b"image/png", None),  # no program needs more than fifty types
    ):
        assert best(accept, TYPES) == chosen, accept


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


async def test_accept_that_allows_no_format_is_told(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, content=SCENE, headers={"Accept": "image/webp"})
    assert "none of application/json, image/jpeg, image/png;" in json(answer, 406)["detail"]


def test_all_units_describe_the_same_box() -> None:
    size = np.array([200, 100] * 2, np.float32)
    boxes = np.array([[20, 10, 60.5, 90], [0, 0, 200, 100]], np.float32)
    scores, ids = np.array([1.0005, 0.123456], np.float32), np.array([2, 3], np.int32)
    found = Detections(boxes, scores, ids, 200, 100, LABELLED, "7")
    sides = boxes[:, 2:] - boxes[:, :2]
    for unit, expected in (
        ("normalized", boxes / size),
        ("pixel", boxes),
        ("coco", np.hstack([boxes[:, :2], sides])),
        ("cxcywh", np.hstack([boxes[:, :2] + sides / 2, sides])),
    ):
        written = msgspec.to_builtins(to_detections(found, unit))  # type: ignore[arg-type]
        values = [one.get("bbox") or [one[name] for name in ("x1", "y1", "x2", "y2")] for one in written]
        np.testing.assert_allclose(values, expected, rtol=0, atol=0.5e-2 if unit != "normalized" else 0.5e-6)
        # A model may have more classes than labels.
        assert [(one["confidence"], one["class_name"]) for one in written] == [(1.0, "traffic light"), (0.1235, "3")]


LARGE = bytes(range(256)) * 4096


async def answered(memory: MemoryBudget, seconds: float, total: float) -> tuple[list[Any], RequestContext]:
    """Send a large response to a client that takes so long for each message; return the messages."""
    context = RequestContext("r1", "")
    context.body_limits = BodyLimits(1, total)
    messages: list[Any] = []

    async def take(message: Any) -> None:  # noqa: ANN401
        messages.append(message)
        assert memory.own_bytes == len(LARGE)
        await asyncio.sleep(seconds)

    scope: Any = {"state": {"request_context": context}}
    await LargeResponse(LARGE, "image/png", memory)(scope, receiving(), take)
    return messages, context


@in_virtual_time
async def test_memory_of_a_large_response_is_counted_until_the_client_has_it_or_is_left(table: WorkerTable) -> None:
    memory = MemoryBudget(table, "memory", 2 << 20)
    messages, context = await answered(memory, 0, 10)
    assert b"".join(message["body"] for message in messages[1:]) == LARGE
    assert not context.is_client_gone
    for seconds, total, left_after, pieces in ((12, 30, 12 + PAUSE_SECONDS, 1), (7, 8, 7 + 8, 2)):
        before = now()
        messages, context = await answered(memory, seconds, total)
        assert (now() - before, len(messages)) == (left_after, 1 + pieces)  # the first message has no body
        assert context.is_client_gone
    assert memory.own_bytes == 0
