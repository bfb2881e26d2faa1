"""Cascades in a real Triton, and in one whose models hang or fail: what is cropped, answered, and left of steps that fail."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import cv2
import grpc
import msgspec
import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from app.cascade import run as run_module
from app.cascade.crops import find_parts
from app.cascade.definition import Cascade, Step
from app.cascade.run import CascadeAnswer, run_cascade
from app.detection.nms import Candidates
from app.errors import (
    DeadlinePassed,
    GatewayError,
    GatewayFull,
    InvalidModelOutput,
    InvalidParameter,
    UnknownModel,
    UnsupportedModel,
)
from app.imaging.patch import Patch
from app.main import open_resources
from app.obb.boxes import enclose, to_corners
from app.pipeline import preprocess
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Classifications, Detections, Embedding
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from tests.fakes import models
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.imaging.samples import encode
from tests.model.configs import spec_of, table
from tests.support import METRICS, SCENE, eventually, in_cycles
from tests.world import Gate, World, open_world


class Runner(NamedTuple):
    pipeline: Pipeline
    metrics: Metrics

    async def run(self, steps: dict[str, Any], image: bytes = SCENE, seconds: float = 30, **context: Any) -> CascadeAnswer:  # noqa: ANN401
        """Run a cascade of these steps, as a file has them."""
        cascade = msgspec.convert({"steps": steps}, Cascade)
        call = CallContext(Deadline.after(seconds), Timing(), "abc", **context)
        return await run_cascade(self.pipeline, cascade, image, call, self.metrics)


@pytest.fixture
async def worker(served: Settings) -> AsyncIterator[Runner]:
    async with open_resources(msgspec.structs.replace(served, model="six_columns")) as (_, pipeline, metrics):
        yield Runner(pipeline, metrics)
        await eventually(lambda: not pipeline.admission.memory.used_bytes)  # of what was left under way
        assert not any(queue.in_progress for queue in pipeline.admission.queues.values())


THINGS = {"model": "six_columns"}
COLOURS = {"model": "bytes_to_logits", "of": "things"}
VECTORS = {"model": "embedding", "of": "things"}
RED, BLUE = models.RECTANGLES.values()


def blank() -> np.ndarray[Any, Any]:
    return np.full((100, 200, 3), 255, np.uint8)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    return encode(Image.fromarray(pixels), "PNG")


def names(results: Any) -> list[str]:  # noqa: ANN401
    assert all(isinstance(result, Classifications) for result in results)
    return [result.spec.class_name(int(result.class_ids[0])) for result in results]


def quarters(result: Any) -> Any:  # noqa: ANN401
    """Return the mean colours (3, 2, 2) of the quarters of what the embedding model saw, 0 to 1."""
    assert isinstance(result, Embedding)
    return (result.vector * result.norm).reshape(3, 2, 2)


async def test_best_objects_of_some_classes_are_cropped(worker: Runner) -> None:
    one, blue = {"max_crops": 1}, {"classes": ["blue"]}
    for limits, objects, truncated in ((one, [0], True), (blue | one, [1], False), ({"classes": ["blue", "0"]}, [0, 1], False)):
        found = await worker.run({"things": THINGS, "colours": {**COLOURS, **limits}})
        assert (found.steps["colours"].objects, found.truncated) == (objects, truncated)


async def test_step_of_another_order_is_about_the_same_crops(worker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction in which a crop is turned is that of its own object."""
    monkeypatch.setattr(run_module, "MAX_CROPS", 1)
    turned = {**VECTORS, "turned_by": "colours"}
    for colour in ("blue", "red"):
        steps = {"colours": {**COLOURS, "classes": [colour]}, "best": turned, "largest": {**turned, "order": "size"}}
        found = await worker.run({"things": THINGS, **steps})
        assert found.truncated
        assert [found.require(name).objects for name in ("best", "largest")] == 2 * [found.require("colours").objects]


async def test_steps_together_crop_a_limited_number_of_parts(worker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part counts once, however many steps are about it."""
    monkeypatch.setattr(run_module, "MAX_CROPS", 3)
    steps = {"things": THINGS, "colours": COLOURS, "again": {**COLOURS, "model": "direction"}}
    assert not (await worker.run(steps)).truncated
    found = await worker.run({**steps, "wider": {**COLOURS, "margin": 0.1, "turned_by": "again"}})
    assert (found.steps["wider"].objects, found.truncated) == ([0], True)


async def test_box_is_enlarged_by_a_margin_within_the_image(worker: Runner) -> None:
    pixels = blank()
    pixels[:50, :100] = 255, 0, 0
    found = await worker.run({"things": THINGS, "vectors": {**VECTORS, "margin": 1}}, png(pixels))
    (vector,) = found.steps["vectors"].results
    # The red part is the top left quarter of the crop, 200 x 100: there are no pixels beyond the other sides.
    assert_allclose(quarters(vector)[1], [[0, 1], [1, 1]], atol=0.05)


async def test_objects_are_aligned_by_their_landmarks(worker: Runner) -> None:
    """The landmarks of the small model are as far apart in its input as in a square object."""
    found = await worker.run(
        {"faces": {"model": "faces_detection"}, "vectors": {"model": "faces_description", "of": "faces", "crop": "landmarks"}}
    )
    red, blue = found.steps["vectors"].results
    assert_allclose(quarters(red).mean(axis=(1, 2)), [1, 0, 0], atol=0.1)
    # The other one is higher than wide in no place: equal scales leave white above and below.
    assert quarters(blue)[2].mean() > 0.95
    assert (quarters(blue)[0] > 0).all()


async def test_objects_that_are_certainly_upside_down_are_turned(worker: Runner) -> None:
    """The small classifier takes blue things for upside down."""
    pixels = blank()
    pixels[20:80, 20:80] = 255, 0, 0
    pixels[20:80, 120:180] = 0, 0, 255
    pixels[20:50, 50:80], pixels[20:50, 150:180] = (200, 0, 0), (0, 0, 200)
    found = await worker.run(
        {"things": THINGS, "direction": {"model": "direction", "of": "things"}, "vectors": {**VECTORS, "turned_by": "direction"}},
        png(pixels),
    )
    assert names(found.steps["direction"].results) == ["0", "180"]
    red, blue = found.steps["vectors"].results
    assert np.unravel_index(quarters(red)[0].argmin(), (2, 2)) == (0, 1)
    assert np.unravel_index(quarters(blue)[2].argmin(), (2, 2)) == (1, 0)


async def test_objects_in_objects_lie_in_the_image(worker: Runner) -> None:
    inner = {"model": "six_columns", "of": "things", "margin": 0.2}
    steps = {"things": THINGS, "inner": inner, "faces": {**inner, "model": "faces_detection", "classes": ["red"]}}
    found = await worker.run({**steps, "colours": {"model": "bytes_to_logits", "of": "inner"}})
    red, blue = found.steps["inner"].results
    (face,) = found.steps["faces"].results
    for result, box in ((red, RED), (blue, BLUE), (face, RED)):
        assert isinstance(result, Detections)
        assert_allclose(result.boxes, [box], atol=2)
        assert (result.width, result.height) == models.SIZE
    assert isinstance(face, Detections)
    assert face.keypoints is not None
    assert_allclose(face.keypoints[0, :, :2], models.FACE * 60 + RED[:2], atol=2)
    assert (names(found.steps["colours"].results), found.steps["colours"].objects) == (["red", "blue"], [0, 1])


@pytest.mark.parametrize(
    ("steps", "kind", "detail"),
    [
        ({"last": {"model": "missing"}}, UnknownModel, "no such model"),
        ({"last": {**COLOURS, "model": "lying"}}, InvalidModelOutput, "lying"),
        ({"last": {**COLOURS, "classes": ["bleu"]}}, InvalidParameter, "blue"),
        (
            {"first": {"model": "faces_detection"}, "last": {**VECTORS, "of": "first", "crop": "landmarks"}},
            UnsupportedModel,
            "embedding is aligned by 0 landmarks, faces_detection finds 5",
        ),
        ({"first": VECTORS, "last": {**COLOURS, "turned_by": "first"}}, UnsupportedModel, "no classifier"),
        (
            {"first": {**COLOURS, "model": "direction"}, "last": {**THINGS, "of": "things", "turned_by": "first"}},
            UnsupportedModel,
            "finds objects",
        ),
    ],
)
async def test_step_that_fails_leaves_the_answers_of_others(
    worker: Runner, steps: dict[str, Any], kind: type[GatewayError], detail: str
) -> None:
    found = await worker.run({"things": THINGS, **steps, "after": {"model": "embedding", "of": "last"}, "colours": COLOURS})
    assert found.steps["last"].error is found.steps["after"].error
    with pytest.raises(kind, match=detail):
        found.require("last")
    assert names(found.require("colours").results) == ["red", "blue"]


async def test_crossed_cascades_never_wait_for_each_other(served: Settings) -> None:
    pair = "six_columns", "stretched_columns"
    crossed = [
        {"first": {"model": one}, "second": {"model": other, "of": "first", "margin": 0.2}} for one, other in (pair, pair[::-1])
    ]
    own = msgspec.structs.replace(served, model="six_columns", max_requests=2)
    async with open_resources(own) as (_, pipeline, metrics):
        worker = Runner(pipeline, metrics)

        async def ask(number: int) -> int:
            while True:
                try:
                    found = await worker.run(crossed[number % 2], is_batch=number % 4 < 2)
                    return len(found.require("second").results)
                except GatewayFull:
                    await asyncio.sleep(0.02)

        assert await asyncio.gather(*map(ask, range(60))) == [2] * 60


SPEC = spec_of(table(1, 300, 7), image=table(1, 640, 640, 3, name="image", data_type="TYPE_UINT8"), batch=0, task="obb")
SIDE = 200


@pytest.mark.parametrize("degrees", [-40, 0, 40, 95])
@pytest.mark.parametrize("is_high", [False, True])
def test_text_in_an_oriented_box_is_upright(degrees: int, *, is_high: bool) -> None:
    """Its first quarter is first: at the left, or in a line that runs downwards above. A box of a model may be higher than wide."""
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    level = np.where(x < SIDE // 2, 255, 0).astype(np.uint8)
    turn = cv2.getRotationMatrix2D((SIDE / 2, SIDE / 2), -degrees, 1)
    colours = np.stack([level, 255 * (y < SIDE // 2).astype(np.uint8), level], axis=-1)
    image = cv2.warpAffine(colours, turn, (SIDE, SIDE)).astype(np.uint8)
    sides = np.array([20, 120] if is_high else [120, 20]) / 2
    box = np.concatenate([SIDE / 2 - sides, SIDE / 2 + sides]).astype(np.float32)
    angle = np.deg2rad(np.float32(degrees - 90 * is_high))
    score, class_id = np.ones(1, np.float32), np.zeros(1, np.int32)
    corners = to_corners(Candidates(box[None], score, class_id, np.array([[angle]], np.float32)))
    found = Detections(enclose(corners), score, class_id, SIDE, SIDE, SPEC, "1", corners=corners)

    [(_, part)] = find_parts(Patch(image), [found], Step(model="reads", of="plates", crop="corners"), SPEC)

    assert part is not None
    pixels = part.cut(SPEC)
    assert pixels.shape[1] > 4 * pixels.shape[0]
    assert pixels[5, 15].min() > 200
    assert pixels[-5, -15].max() < 50


OBJECTS = 300
SECONDS = 20.0
INNER = {"model": "second", "of": "things"}
STEPS = {"things": {"model": "tiny"}, "other": {"model": "third"}, "inner": INNER}


class Finding(FakeTriton):
    """Finds as many objects as can be cropped, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG | {"output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [OBJECTS, 6]}]}
        self.answer = infer_response(output0=np.tile(np.array([4, 9, 28, 22, 0.9, 0], np.float32), (OBJECTS, 1)))
        self.held = {"abc-inner"}

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.requests]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(Finding(), max_requests=2) as made:
        yield made
        await made.settle()
        await eventually(lambda: not made.used_bytes)
        assert [queue.in_progress for queue in made.admission.queues.values()] == [0] * len(made.admission.queues)


async def run(world: World, steps: Any = STEPS, caller: Caller = ANYBODY) -> CascadeAnswer:  # noqa: ANN401
    return await Runner(world.pipeline, METRICS).run(steps, seconds=SECONDS, caller=caller)


def errors(found: CascadeAnswer) -> list[str | None]:
    return [step.error.code if step.error else None for step in found.steps.values()]


async def test_all_crops_are_asked_about_a_few_at_a_time(world: World) -> None:
    found = await run(world, {**STEPS, "again": {**INNER, "margin": 0.1}})
    assert (len(found.steps["inner"].results), found.truncated) == (OBJECTS, True)
    assert found.steps["again"].results == []
    assert world.fake.most_running <= 3  # of three models


@pytest.mark.parametrize("leaves", [True, False])
async def test_step_that_hangs_ends_with_its_client_or_at_the_deadline(world: World, *, leaves: bool) -> None:
    world.hold()
    running = asyncio.create_task(run(world))
    await eventually(lambda: "abc-inner" in world.fake.ids)
    if leaves:
        await world.leave([running])
    else:
        await world.time.skip(SECONDS)
        assert errors(await running) == [None, None, "deadline_passed"]
    await world.settle()
    assert world.fake.ids.count("abc-inner") == 1


async def test_crop_that_fails_fails_its_step_and_keeps_no_image(world: World) -> None:
    with in_cycles(Patch) as patches:
        world.fake.next_refusals = [None, None, *[(grpc.StatusCode.INTERNAL, "broken")] * 10]
        found = await run(world)
        assert errors(found) == [None, None, "inference_failed"]
        assert not [kept for kept in gc.get_objects() if isinstance(kept, Patch)]
    assert patches == []


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_memory_of_the_image_is_held_while_a_thread_reads_it(monkeypatch: pytest.MonkeyPatch, world: World, how: str) -> None:
    gate = Gate()
    gate.block(monkeypatch, preprocess, "fill_from_patch")
    running = asyncio.create_task(run(world))
    await eventually(gate.reached.is_set)
    if how == "cancelled":
        running.cancel()
    else:
        await world.time.skip(SECONDS)
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlinePassed):
        await running
    assert world.used_bytes >= models.SIZE[0] * models.SIZE[1] * 3
    gate.opened.set()
    await eventually(lambda: not world.used_bytes)


async def test_crops_take_no_place_of_others(world: World) -> None:
    world.hold()
    many = [asyncio.create_task(run(world, {"things": STEPS["things"], "inner": INNER}, Caller("many"))) for _ in range(2)]
    await eventually(lambda: world.fake.ids.count("abc-inner") == 2)
    more = asyncio.create_task(run(world, {"things": STEPS["things"], "inner": INNER}, Caller("many")))
    await eventually(lambda: world.admission.queues["second"].waiting == 1)

    assert len((await world.detect(model="second", caller=Caller("few"))).scores) == 100
    with pytest.raises(GatewayFull):
        await world.detect(model="second", caller=Caller("many"))
    await world.leave([*many, more])
