"""The whole pipeline: replaced models, threads, deadlines, memory and slots; what is dropped frees its memory."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from app.errors import DeadlinePassed, InvalidImage, InvalidModelOutput, ModelNotReady
from app.imaging.fit import fit_for
from app.pipeline import call as call_module
from app.pipeline import draw as draw_module
from app.pipeline import preprocess, results
from app.pipeline.call import CallContext
from app.pipeline.decode_threads import DecodeThreads
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import SHADOW, Caller, Turn
from app.resilience.lease import Lease
from app.telemetry.timing import DRAW, Timing
from app.triton.messages import InferResult
from app.triton.shared_memory import SLOTS
from tests.fakes import models
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, infer_response
from tests.imaging.samples import encode
from tests.model.configs import spec_of, table
from tests.pipeline.conftest import MISSHAPEN
from tests.support import SCENE, eventually
from tests.world import Gate, World

TABLE = np.array([[8, 16, 16, 24, 0.5, 1], [0, 8, 32, 24, 0.75, 0]], np.float32)
"""Two rows in pixels of the 32 x 32 canvas. The image of 200 x 100 covers 32 x 16 of it."""
FILE = {"input": [{"name": "file", "data_type": "TYPE_STRING", "dims": [1]}], "parameters": {"square": {"string_value": "32"}}}


@pytest.fixture
async def world(world: World) -> World:
    world.fake.answer = infer_response(output0=TABLE)
    return world


def replace(fake: FakeTriton, version: str = "2", labels: str = "new,other", **config: Any) -> None:  # noqa: ANN401
    fake.config = {**CONFIG, **config, "parameters": {"labels": {"string_value": labels}}}
    fake.model_versions = [version]


def named(found: Detections) -> tuple[str, list[str]]:
    return found.version, [found.spec.class_name(class_id) for class_id in found.class_ids]


async def test_model_that_is_replaced_all_the_time_is_not_ready(world: World) -> None:
    await world.detect()
    world.fake.answer.model_version = "2"
    with pytest.raises(ModelNotReady, match="being replaced"):
        await world.detect()

    assert len(world.fake.requests) == 4


async def test_answer_has_the_labels_of_the_version_that_gave_it(world: World) -> None:
    """The first request after a replacement starts over with the new version."""
    replace(world.fake, "1", "old,old")
    for _ in range(2):
        assert named(await world.detect()) == ("1", ["old", "old"])
    replace(world.fake)
    for _ in range(2):
        assert named(await world.detect()) == ("2", ["new", "other"])

    assert len(world.fake.requests) == 5


async def test_restarted_triton_may_have_other_labels_under_the_same_version(world: World) -> None:
    replace(world.fake, "1", "old,old")
    await world.detect()
    replace(world.fake, "1", "new,other")
    world.client.connection += 1

    assert named(await world.detect()) == ("1", ["new", "other"])


async def test_version_of_another_size_is_asked_with_an_image_of_that_size(world: World) -> None:
    await world.detect()
    replace(world.fake, input=[{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}])
    world.fake.next_refusals = [MISSHAPEN]

    assert named(await world.detect()) == ("2", ["new", "other"])
    assert [list(request.inputs[0].shape) for request in world.fake.requests][1:] == [[32, 32, 3], [64, 64, 3]]


@pytest.mark.parametrize(
    ("step", "config", "options", "is_threaded"),
    [
        ("fill_input", CONFIG, {}, True),
        ("fill_input", CONFIG | FILE, {}, False),  # only its header is read
        ("decode_boxes", CONFIG, {}, False),
        ("decode_boxes", CONFIG, {"iou": 0.5}, True),
        ("decode_boxes", CONFIG | {"output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [6, 21]}]}, {}, True),
    ],
)
async def test_work_of_milliseconds_runs_in_a_thread(  # noqa: PLR0913 - a table
    monkeypatch: pytest.MonkeyPatch, world: World, step: str, config: dict[str, Any], options: dict[str, Any], *, is_threaded: bool
) -> None:
    """On the event loop, it would delay every other request; all else takes less time than a thread costs."""
    world.fake.config = config
    world.fake.answer = infer_response(output0=np.zeros(config["output"][0]["dims"], np.float32))
    module = preprocess if step == "fill_input" else call_module
    original, threads = getattr(module, step), list[str]()

    def noted(*arguments: Any) -> Any:  # noqa: ANN401
        threads.append(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(module, step, noted)
    await world.detect(models.scene("JPEG"), **options)

    threads = [name for name in threads if not name.startswith("asyncio")]  # of a gateway of another test
    assert [name.startswith("decode") for name in threads] == [is_threaded]


async def test_failure_gives_its_slot_back(world: World) -> None:
    with pytest.raises(InvalidImage):
        await world.detect(SCENE[:500])
    assert not world.fake.requests
    world.fake.answer = infer_response(output0=TABLE[:, :5])
    with pytest.raises(InvalidModelOutput, match="tiny"):
        await world.detect()

    assert world.free_slots() == SLOTS


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_slot_and_place_are_free_only_when_thread_and_rpc_have_ended(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate, how: str
) -> None:
    """A decoder cannot be stopped, and Triton is still busy. An image that waits for a thread is dropped."""
    world.hold()
    asking = [asyncio.ensure_future(world.detect())]
    await eventually(lambda: len(world.fake.requests) == 1)
    gate.block(monkeypatch, preprocess, "decode")
    asking.append(asyncio.ensure_future(world.detect()))
    await eventually(gate.reached.is_set)
    before = world.used_bytes
    asking += [asyncio.ensure_future(world.detect()) for _ in range(3)]
    await eventually(lambda: world.used_bytes > before)
    if how == "deadline":
        await world.time.skip(30)
    else:
        for task in asking:
            task.cancel()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(error) for error in ended} == {DeadlinePassed if how == "deadline" else asyncio.CancelledError}
    assert world.free_slots() == SLOTS - 2
    assert world.queue.in_progress == 2
    gate.opened.set()
    await eventually(lambda: world.free_slots() == SLOTS - 1)
    world.let_answer()

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)
    assert world.free_slots() == SLOTS
    assert len(world.fake.requests) == 1


@pytest.mark.parametrize("shape", [(736, 768), (768, 736)])
def test_map_of_text_of_another_size_than_the_input_is_rejected(shape: tuple[int, int]) -> None:
    pixels = table(-1, -1, 3, data_type="TYPE_UINT8")
    spec = spec_of(table(-1, -1, name="map", data_type="TYPE_UINT8"), image=pixels, task="text_detection")
    found = np.zeros(shape, np.uint8)
    found[100:120, 100:300] = 255
    decoded = call_module.decode(spec, InferResult({"map": found[None]}, "1"), fit_for(spec).fit(768, 736))
    read = call_module.TaskOptions[results.TextRegions]("text_detection", None).reader(spec).read
    if shape == (736, 768):
        assert len(read(decoded, Deadline.after(60)).scores) == 1
    else:
        with pytest.raises(InvalidModelOutput, match=r"m returned a map of 768x736 for an input of 736x768"):
            read(decoded, Deadline.after(60))


A, B = Caller("a"), Caller("b")
LARGE = 1e6
"""Pixels of an image that is decoded in another thread."""


@pytest.fixture
def pool() -> Iterator[DecodeThreads]:
    made = DecodeThreads(1)
    yield made
    made.close()


def start(pool: DecodeThreads, work: Callable[[], Any], turn: Turn = Turn(A)) -> asyncio.Future[Any]:  # noqa: B008 - a constant
    return asyncio.ensure_future(pool.run(work, Deadline.after(30), turn=turn))


@pytest.mark.parametrize("is_late", [False, True])
async def test_queued_job_that_is_dropped_frees_what_it_refers_to(pool: DecodeThreads, gate: Gate, *, is_late: bool) -> None:
    """The image of a request that has left or missed its deadline does not stay in memory until a thread is free."""
    deadline: Any = SimpleNamespace(remaining=0.001 if is_late else 30)
    blocking = start(pool, gate.wait)
    await eventually(gate.reached.is_set)
    image = np.zeros(1)
    left = weakref.ref(image)
    asking = asyncio.ensure_future(pool.run(partial(id, image), deadline, Lease(), turn=Turn(A)))
    await asyncio.sleep(0)
    del image
    assert (left() is not None, pool.waiting) == (True, 1)
    if not is_late:
        asking.cancel()
    with pytest.raises(DeadlinePassed if is_late else asyncio.CancelledError):
        await asking
    del asking
    assert (left(), pool.waiting) == (None, 0)
    gate.opened.set()

    assert await blocking == "done"


async def test_large_images_and_shadows_have_threads_of_their_own(pool: DecodeThreads, gate: Gate) -> None:
    """Those of large images have a lower priority."""
    shadow = Turn(Caller("shadow", priority=SHADOW))
    blocked = [start(pool, gate.wait, shadow._replace(cost=cost)) for cost in (0, 1e7)]
    await eventually(gate.reached.is_set)
    read_niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
    usual = await start(pool, read_niceness, Turn(B))
    assert await start(pool, read_niceness, Turn(B, LARGE)) == min(usual + 6, 19)
    large = Gate()
    blocked.append(start(pool, large.wait, Turn(A, LARGE)))
    await eventually(large.reached.is_set)

    assert await start(pool, lambda: "small") == "small"
    assert (pool.waiting, [task.done() for task in blocked]) == (1, [False] * 3)
    for each in (gate, large):
        each.opened.set()
    assert await asyncio.gather(*blocked) == ["done"] * 3


@pytest.mark.parametrize("is_late", [False, True])
async def test_memory_and_backlog_count_until_a_picture_is_drawn(
    world: World, monkeypatch: pytest.MonkeyPatch, gate: Gate, *, is_late: bool
) -> None:
    """Also after its request has left or missed its deadline."""
    data = encode(PIL.Image.new("RGB", (2000, 1000)), "PNG")
    found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), 2000, 1000, SPEC, "1")
    threads = gate.block(monkeypatch, draw_module, "draw_picture")
    context = CallContext(Deadline.after(3 if is_late else 30), Timing(), "abc")  # it begins before 3 s
    task = asyncio.create_task(draw_module.draw(world.pipeline, data, found, "image/png", context))
    await eventually(gate.reached.is_set)
    admission = world.admission
    nbytes = 2 * len(data) + 2_000_000 * (7 + 6)  # a copy of the file, decoded by Pillow, and the picture
    assert threads[0].startswith("decode")
    assert (admission.decode_backlog.pixels, admission.memory.own_bytes) == (8 * 2_000_000, nbytes)
    if not is_late:
        task.cancel()
    with pytest.raises(DeadlinePassed if is_late else asyncio.CancelledError):
        await task
    assert context.timing.fail() == DRAW
    assert admission.memory.own_bytes == nbytes
    gate.opened.set()

    await eventually(lambda: admission.memory.own_bytes == admission.decode_backlog.pixels == 0)
