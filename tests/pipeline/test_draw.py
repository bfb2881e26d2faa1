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

FOUND = Detections(
    np.array([[10, 20, 60, 70]], np.float32),
    np.array([0.5], np.float32),
    np.array([7], np.int32),
    200,
    100,
    msgspec.structs.replace(SPEC, labels=("person",)),
    "1",
)
IMAGE = encode(Image.new("RGB", (200, 100)), "PNG")
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


async def test_the_picture_shows_what_was_found(pipeline: Pipeline) -> None:
    context = call()
    picture = await draw(pipeline, IMAGE, FOUND, "image/png", context)

    with Image.open(BytesIO(picture)) as image:
        assert image.size == (200, 100)
        assert image.getpixel((10, 60)) == colour_of(7)
    assert list(context.timing.stages) == ["draw"]


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ({"masks": [Mask([TRIANGLE])]}, (15, 25)),
        ({"masks": [Mask([TRIANGLE], b"PNG", (10, 20))]}, (15, 25)),
        ({"keypoints": np.array([[[35, 45, 0.9]]], np.float32)}, (35, 45)),
        ({"corners": np.array([[[20, 20], [60, 60], [50, 70], [10, 30]]], np.float32)}, (40, 40)),
    ],
)
async def test_the_picture_shows_masks_keypoints_and_oriented_boxes(
    pipeline: Pipeline, shape: dict[str, Any], at: tuple[int, int]
) -> None:
    without, shown = [await draw(pipeline, IMAGE, found, "image/png", call()) for found in (FOUND, FOUND._replace(**shape))]

    with Image.open(BytesIO(without)) as one, Image.open(BytesIO(shown)) as other:
        assert one.getpixel(at) == (0, 0, 0) != other.getpixel(at)


async def test_memory_and_backlog_count_while_a_picture_is_drawn(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    threads = gate.block(monkeypatch, draw_module, "draw_picture")
    task = asyncio.create_task(draw(pipeline, LARGE, FOUND, "image/png", call()))
    assert await asyncio.to_thread(gate.reached.wait, 10)
    admission = pipeline.admission
    nbytes = len(LARGE) + 2_000_000 * (7 + 6)  # decoded by Pillow, and the picture

    assert threads[0].startswith("decode")
    assert admission.decode_backlog.pixels == 8 * 2_000_000
    assert admission.memory.own_bytes == nbytes
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.memory.own_bytes == nbytes
    gate.opened.set()
    await eventually(lambda: admission.memory.own_bytes == admission.decode_backlog.pixels == 0)


async def test_a_picture_that_is_late_is_an_error(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    gate.block(monkeypatch, draw_module, "draw_picture")

    context = call(0.05)
    with pytest.raises(DeadlinePassed):
        await draw(pipeline, IMAGE, FOUND, "image/png", context)
    assert context.timing.fail() == DRAW
    gate.opened.set()


@pytest.mark.parametrize("nbytes", [len(LARGE) - 1, len(LARGE) + 1000])
async def test_a_picture_for_which_there_is_no_memory_is_rejected(pipeline: Pipeline, nbytes: int) -> None:
    memory = pipeline.admission.memory
    with memory.reserve(ANYBODY) as others:
        others.add(memory.limit_bytes - nbytes)
        with pytest.raises(GatewayFull, match="memory"):
            await draw(pipeline, LARGE, FOUND, "image/png", call())


async def test_a_picture_that_would_take_too_long_is_rejected(pipeline: Pipeline) -> None:
    with pipeline.admission.decode_backlog.add(10**9, Deadline.after(60), ANYBODY), pytest.raises(GatewayFull, match="too long"):
        await draw(pipeline, LARGE, FOUND, "image/jpeg", call(5))
