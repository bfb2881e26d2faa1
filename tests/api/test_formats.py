"""Formats of a result, boxes in the unit asked for, and large responses, whose memory is counted."""

import asyncio
import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any, get_args

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar.types import Message
from PIL import Image

from app.api.answering.format import best
from app.api.answering.native import to_detections
from app.api.answering.responses import LargeResponse
from app.api.answering.schema import BoxFormat
from app.api.context import PAUSE_SECONDS, BodyLimits, RequestContext
from app.errors import GatewayFull
from app.imaging.drawing import colour_of
from app.pipeline.results import Detections
from app.resilience.fairness import ANYBODY
from app.resilience.memory import MemoryBudget
from app.resilience.worker_table import WorkerTable
from tests.api.virtual_time import in_virtual_time, now
from tests.fakes.triton import SPEC
from tests.support import SCENE, json, receiving

PATH = "/predict/six_columns"
LABELLED = msgspec.structs.replace(SPEC, labels=("person", "car", "traffic light"))
TYPES = ("application/json", "image/jpeg", "image/png")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"image/*", "image/jpeg"),
        (b"*/*", "application/json"),
        (b"image/jpeg; q=0.5 ,image/png;q=0.6", "image/png"),
        (b"image/jpeg;q=0, image/*", "image/png"),
        (b"*/*;q=0.9, image/png;Q=1.000", "image/png"),
        # What browsers send for a page.
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", "application/json"),
        (b"image/webp, text/html;q=0.5", None),
        # A header without a media type asks for nothing.
        (b"\xff\xfe", "application/json"),
        # No program needs more than fifty types.
        (b"text/html," * 50 + b"image/png", None),
    ],
)
def test_type_with_the_highest_quality_is_chosen(accept: bytes, chosen: str | None) -> None:
    """The most specific range counts; of several with equal quality, the first type that is available (RFC 9110, 12.5.1)."""
    assert best(accept, TYPES) == chosen


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


LARGE = bytes(range(256)) * 4096


class Client:
    def __init__(self, memory: MemoryBudget, *, total: float = 10, seconds: float = 0) -> None:
        self.context = RequestContext("r1", "")
        self.context.body_limits = BodyLimits(1, total)
        self.messages: list[Message] = []
        self.reserved: list[int] = []
        self._memory = memory
        self._seconds = seconds

    async def get(self, response: LargeResponse) -> bytes:
        scope: dict[str, object] = {}
        scope["state"] = {"request_context": self.context}
        await response(scope, receiving(), self._take)  # type: ignore[arg-type]
        return b"".join(message["body"] for message in self.messages[1:])  # type: ignore[typeddict-item]

    async def _take(self, message: Message) -> None:
        self.messages.append(message)
        self.reserved.append(self._memory.own_bytes)
        await asyncio.sleep(self._seconds)


@pytest.fixture
def memory(table: WorkerTable) -> Iterator[MemoryBudget]:
    """A budget of 2 MiB that must be free again afterwards."""
    budget = MemoryBudget(table, "memory", 2 << 20)
    yield budget
    assert budget.own_bytes == 0


async def test_body_arrives_whole(memory: MemoryBudget) -> None:
    client = Client(memory)

    assert await client.get(LargeResponse(LARGE, "image/png", memory)) == LARGE
    pieces = client.messages[1:]
    assert [message["more_body"] for message in pieces] == [True] * (len(pieces) - 1) + [False]  # type: ignore[typeddict-item]
    assert max(len(message["body"]) for message in pieces) <= 1 << 18  # type: ignore[typeddict-item]
    assert set(client.reserved) == {len(LARGE)}
    assert not client.context.is_client_gone


@in_virtual_time
async def test_client_that_does_not_read_is_left(memory: MemoryBudget) -> None:
    for seconds, total, left_after, pieces in ((12, 30, 12 + PAUSE_SECONDS, 1), (7, 8, 7 + 8, 2)):
        before = now()
        client = Client(memory, total=total, seconds=seconds)  # for each message, the first of which has no body
        await client.get(LargeResponse(LARGE, "image/png", memory))
        assert (now() - before, len(client.messages)) == (left_after, 1 + pieces)
        assert client.context.is_client_gone


async def test_response_that_has_no_room_is_rejected(memory: MemoryBudget) -> None:
    client = Client(memory)
    with memory.reserve(ANYBODY) as other:
        other.add(2 << 20)
        with pytest.raises(GatewayFull):
            await client.get(LargeResponse(LARGE, "image/png", memory))

    assert client.messages == []
