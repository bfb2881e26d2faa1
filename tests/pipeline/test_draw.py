"""Drawing detections: threads, deadline, and memory, which is released afterwards."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from app.errors import DeadlinePassed, GatewayFull
from app.imaging.drawing import colour_of
from app.pipeline import draw as draw_module
from app.pipeline.call import CallContext
from app.pipeline.draw import draw
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.segmentation.mask import Mask
from app.telemetry.timing import DRAW, Timing
from tests.fakes.triton import SPEC
from tests.imaging.samples import encode
from tests.pipeline.gate import Gate
from tests.support import eventually
from tests.world import World

LABELLED = msgspec.structs.replace(SPEC, labels=("person",))
FOUND = Detections(
    np.array([[10, 20, 60, 70]], np.float32), np.array([0.5], np.float32), np.array([7], np.int32), 200, 100, LABELLED, "1"
)
TRIANGLE = np.array([[10, 20], [60, 20], [10, 70]], np.float32)
LARGE = encode(Image.new("RGB", (2000, 1000)), "PNG")


def call(seconds: float = 30) -> CallContext:
    return CallContext(Deadline.after(seconds), Timing(), "abc")


@pytest.fixture
async def pipeline(world: World) -> AsyncIterator[Pipeline]:
    """A pipeline with one thread, whose memory and backlog must be empty after the test."""
    yield world.pipeline
    await world.pipeline.close()
    assert (world.admission.memory.own_bytes, world.admission.decode_backlog.pixels) == (0, 0)


@pytest.mark.parametrize(
    ("shape", "at", "colour"),
    [
        ({}, (35, 45), (0, 0, 0)),
        ({"masks": [Mask([TRIANGLE])]}, (15, 25), None),
        ({"masks": [Mask([TRIANGLE], b"PNG", (10, 20))]}, (15, 25), None),
        ({"keypoints": np.array([[[35, 45, 0.9]]], np.float32)}, (35, 45), None),
        ({"corners": np.array([[[20, 20], [60, 60], [50, 70], [10, 30]]], np.float32)}, (40, 40), None),
    ],
)
async def test_picture_shows_what_was_found(
    pipeline: Pipeline, shape: dict[str, Any], at: tuple[int, int], colour: tuple[int, int, int] | None
) -> None:
    context = call()
    data = encode(Image.new("RGB", (200, 100)), "PNG")
    picture = await draw(pipeline, data, FOUND._replace(**shape), "image/png", context)

    with Image.open(BytesIO(picture)) as image:
        assert image.size == (200, 100)
        assert "corners" in shape or image.getpixel((10, 60)) == colour_of(7)
        assert (image.getpixel(at) == (0, 0, 0)) is (colour is not None)
    assert list(context.timing.stages) == ["draw"]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_memory_and_backlog_count_until_a_picture_is_drawn(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, gate: Gate, how: str
) -> None:
    threads = gate.block(monkeypatch, draw_module, "draw_picture")
    context = call(30 if how == "cancel" else 0.05)
    task = asyncio.create_task(draw(pipeline, LARGE, FOUND, "image/png", context))
    await eventually(gate.reached.is_set)
    admission = pipeline.admission
    nbytes = len(LARGE) + 2_000_000 * (7 + 6)  # decoded by Pillow, and the picture
    assert threads[0].startswith("decode")
    assert (admission.decode_backlog.pixels, admission.memory.own_bytes) == (8 * 2_000_000, nbytes)
    if how == "cancel":
        task.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else DeadlinePassed):
        await task
    assert context.timing.fail() == DRAW
    assert admission.memory.own_bytes == nbytes
    gate.opened.set()

    await eventually(lambda: admission.memory.own_bytes == admission.decode_backlog.pixels == 0)


async def test_picture_that_would_take_too_long_is_rejected(pipeline: Pipeline) -> None:
    with pipeline.admission.decode_backlog.add(10**9, Deadline.after(60), ANYBODY), pytest.raises(GatewayFull, match="too long"):
        await draw(pipeline, LARGE, FOUND, "image/jpeg", call(5))
