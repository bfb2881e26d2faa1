"""The whole pipeline: replaced models, threads, deadlines, memory and slots, and what the options of a request leave out."""

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.detection.nms import Candidates
from app.errors import (
    DeadlinePassed,
    GatewayFull,
    InvalidImage,
    InvalidModelOutput,
    InvalidParameter,
    ModelNotReady,
)
from app.imaging.fit import fit_for
from app.imaging.transform import ImageTransform
from app.model.heads import DetectionHead, OutputFormat
from app.model.spec import from_triton_config
from app.pipeline import call as call_module
from app.pipeline import preprocess, results
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from app.triton.shared_memory import SLOTS
from tests.detection.test_select import crowds
from tests.fakes import models
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.pipeline import refusals
from tests.pipeline.gate import Gate
from tests.support import LIMITS, SCENE, eventually
from tests.world import World

TABLE = np.array([[8, 16, 16, 24, 0.5, 1], [0, 8, 32, 24, 0.75, 0]], np.float32)
"""Two rows in pixels of the 32 x 32 canvas. The image of 200 x 100 covers 32 x 16 of it."""
FILE = {"input": [{"name": "file", "data_type": "TYPE_STRING", "dims": [1]}], "parameters": {"square": {"string_value": "32"}}}


def output(tensor: NDArray[np.float32]) -> dict[str, Any]:
    return {"output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": list(tensor.shape)}]}


@pytest.fixture
async def world(world: World) -> World:
    world.fake.answer = infer_response(output0=TABLE)
    return world


async def test_image_becomes_detections(world: World) -> None:
    world.fake.model_versions = ["7"]
    timing = Timing()
    found = await world.detect(timing=timing)

    assert found.boxes.tolist() == [[0, 0, 200, 100], [50, 50, 100, 100]]
    assert found.scores.tolist() == [0.75, 0.5]
    assert found.class_ids.tolist() == [0, 1]
    assert (found.width, found.height) == models.SIZE
    assert (found.spec.name, found.version) == ("tiny", "7")
    assert list(timing.stages) == ["model", "queue", "decode", "batch", "infer", "post"]


def replace(fake: FakeTriton, version: str = "2", labels: str = "new,other", **config: Any) -> None:  # noqa: ANN401
    fake.config = {**CONFIG, **config, "parameters": {"labels": {"string_value": labels}}}
    fake.model_versions = [version]


def named(found: Detections) -> tuple[str, list[str]]:
    """Return the version that answered, and the class names of the detections."""
    return found.version, [found.spec.class_name(class_id) for class_id in found.class_ids]


async def test_model_that_is_replaced_all_the_time_is_not_ready(world: World) -> None:
    await world.detect()
    world.fake.answer.model_version = "2"
    with pytest.raises(ModelNotReady, match="being replaced"):
        await world.detect()

    assert len(world.fake.requests) == 4


@pytest.mark.world(memory_bytes=2000)
async def test_bodies_take_memory_while_triton_does_not_answer(world: World) -> None:
    world.fake.may_tell.clear()
    waiting = [asyncio.ensure_future(world.detect(bytes(1000))) for _ in range(2)]
    await eventually(lambda: world.used_bytes == 2000)
    with pytest.raises(GatewayFull, match="no memory left"):
        await world.detect(bytes(1000))
    await world.leave(waiting)

    assert world.used_bytes == 0


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
    world.fake.next_refusals = [refusals.MISSHAPEN]

    assert named(await world.detect()) == ("2", ["new", "other"])
    assert [list(request.inputs[0].shape) for request in world.fake.requests][1:] == [[32, 32, 3], [64, 64, 3]]


@pytest.mark.parametrize(
    ("step", "config", "image_format", "options", "is_threaded"),
    [
        ("fill_input", CONFIG, "JPEG", {}, True),
        ("fill_input", CONFIG | FILE, "JPEG", {}, False),  # only its header is read; Pillow may take longer for others
        ("fill_input", CONFIG | FILE, "PNG", {}, True),
        ("decode_boxes", CONFIG, "BMP", {}, False),
        ("decode_boxes", CONFIG, "BMP", {"iou": 0.5}, True),
        ("decode_boxes", CONFIG | output(np.zeros((6, 21), np.float32)), "BMP", {}, True),
    ],
)
async def test_work_of_milliseconds_runs_in_a_thread(  # noqa: PLR0913, PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    step: str,
    config: dict[str, Any],
    image_format: str,
    options: dict[str, Any],
    is_threaded: bool,  # noqa: FBT001
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
    await world.detect(models.scene(image_format), **options)

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


async def test_closing_waits_for_images_and_inferences(monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate) -> None:
    """Threads and RPCs use slots, also after their requests have left."""
    world.hold()
    asking = [asyncio.ensure_future(world.detect())]
    await eventually(lambda: len(world.fake.requests) == 1)
    gate.block(monkeypatch, preprocess, "fill_input")
    asking.append(asyncio.ensure_future(world.detect()))
    await eventually(gate.reached.is_set)
    await world.time.skip(30)
    late = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(error) for error in late] == [DeadlinePassed] * 2
    asyncio.get_running_loop().call_soon(world.let_answer)
    threading.Timer(0.1, gate.opened.set).start()
    await world.pipeline.close()

    assert gate.opened.is_set()
    assert world.fake.may_answer.is_set()
    await eventually(lambda: world.used_bytes == 0)
    assert world.free_slots() == SLOTS


def test_time_of_a_request_is_chosen_by_its_caller_or_grows_with_its_images() -> None:
    """The maximum for callers does not limit the default."""
    assert [LIMITS.timeout(None, images) for images in (0, 1, 2, 21, 41, 64)] == [10, 10, 10.5, 20, 30, 30]
    assert [LIMITS.timeout(1500), LIMITS.timeout(30_000), LIMITS.timeout(1500, 64)] == [1.5, 30, 1.5]
    assert [LIMITS._replace(timeout_seconds=60).timeout(None, images) for images in (1, 64)] == [60, 60]
    with pytest.raises(InvalidParameter, match=r"^timeout_ms: the maximum is 30000$"):
        LIMITS.timeout(30_001)


TRANSFORM = ImageTransform(0, 0, 32, 32, 32, 32)
MODEL = {
    "name": "m",
    "max_batch_size": 1,
    "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
    "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [300, 6]}],
}


def answer_to(rows: object, options: call_module.DetectOptions, *, max_iou: float) -> results.Detections:
    """Ask a model for what it has found: rows of x1 y1 x2 y2 score class, after an NMS of its own if `max_iou` is below 1."""
    head = DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)
    spec = msgspec.structs.replace(from_triton_config(MODEL, "1"), head=head)
    decoded = call_module.decode(spec, InferResult({"o": np.array([rows], np.float32)}, "1"), TRANSFORM)
    return options.reader(spec).read(decoded, Deadline.after(60))


@pytest.mark.parametrize(
    ("max_iou", "iou", "kept"),
    [
        (0.45, None, 1),
        (0.45, 0.8, 3),  # which is what the model leaves
        (1.0, None, 3),
        (1.0, 0.5, 2),
    ],
)
def test_overlap_gives_way_to_that_of_the_model(max_iou: float, iou: float | None, kept: int) -> None:
    """A threshold above the model's own is lowered to it; a default does not apply to a model without duplicate boxes."""
    rows = [[0, 0, 10, height, score, 0] for height, score in ((10, 0.9), (6, 0.8), (4, 0.7))]  # overlaps of 0.6, 0.4 and 0.67
    options = call_module.DetectOptions(None, 0.5, None, 10, iou, lowers_iou=True, default_iou=0.3)

    assert len(answer_to(rows, options, max_iou=max_iou).scores) == kept


@given(
    found=crowds(),
    max_iou=st.sampled_from([0.45, 1.0]),
    iou=st.none() | st.floats(0, 0.45),
    agnostic=st.booleans(),
    most=st.integers(1, 12),
    confidence=st.floats(0, 1),
    classes=st.sets(st.sampled_from("012"), min_size=1),
)
def test_each_wish_leaves_out_and_never_adds(  # noqa: PLR0913 - what is drawn
    *, found: Candidates, max_iou: float, iou: float | None, agnostic: bool, most: int, confidence: float, classes: set[str]
) -> None:
    """Fewer classes with `agnostic`, and `agnostic` for raw heads, may add boxes: what they drop suppresses nothing."""
    rows = np.column_stack([found.boxes, found.scores, found.class_ids])
    question = call_module.DetectOptions(None, 0.0, None, 300, iou, agnostic)

    def answer(**changes: Any) -> list[tuple[float, ...]]:  # noqa: ANN401
        boxes, scores, class_ids = answer_to(rows, question._replace(**changes), max_iou=max_iou)[:3]
        return [(*box, score, id_) for box, score, id_ in zip(boxes.tolist(), scores.tolist(), class_ids.tolist(), strict=True)]

    whole = answer()
    assert answer(max_detections=most) == whole[:most]
    assert answer(confidence=confidence) == [one for one in whole if one[4] >= np.float32(confidence)]
    if not agnostic:
        assert answer(classes=sorted(classes)) == [one for one in whole if str(one[5]) in classes]
    assert {*whole} <= {*answer(iou=None, agnostic=False)}


@pytest.mark.parametrize("shape", [(736, 768), (768, 736)])
def test_map_of_text_of_another_size_than_the_input_is_rejected(shape: tuple[int, int]) -> None:
    config = {
        "name": "m",
        "max_batch_size": 1,
        "input": [{"name": "images", "data_type": "TYPE_UINT8", "dims": [-1, -1, 3]}],
        "output": [{"name": "map", "data_type": "TYPE_UINT8", "dims": [-1, -1]}],
        "parameters": {"task": {"string_value": "text_detection"}},
    }
    spec = from_triton_config(config, "1")
    found = np.zeros(shape, np.uint8)
    found[100:120, 100:300] = 255
    decoded = call_module.decode(spec, InferResult({"map": found[None]}, "1"), fit_for(spec).fit(768, 736))
    read = call_module.TaskOptions[results.TextRegions]("text_detection", None).reader(spec).read
    if shape == (736, 768):
        assert len(read(decoded, Deadline.after(60)).scores) == 1
    else:
        with pytest.raises(InvalidModelOutput, match=r"m returned a map of 768x736 for an input of 736x768"):
            read(decoded, Deadline.after(60))
