"""The whole pipeline: replaced models, threads, deadlines, memory and slots."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.errors import (
    CircuitOpen,
    DeadlinePassed,
    GatewayFull,
    InvalidImage,
    InvalidModelOutput,
    InvalidParameter,
    ModelNotReady,
    UnknownModel,
)
from app.pipeline import call as call_module
from app.pipeline import preprocess
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import HIGH, LOW, NORMAL, Caller
from app.telemetry.timing import Timing
from app.triton.shared_memory import SLOTS
from tests.fakes import models
from tests.fakes.triton import CONFIG, FakeTriton, config_with, infer_response
from tests.imaging.samples import GREY, png
from tests.pipeline import refusals
from tests.pipeline.gate import Gate
from tests.support import LIMITS, SCENE, eventually, is_mapped
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


@pytest.mark.parametrize(("labels", "requests"), [("old,old", 5), ("new,other", 4)])
async def test_answer_has_the_labels_of_the_version_that_gave_it(world: World, labels: str, requests: int) -> None:
    """The first request after a replacement starts over with the new version, if that means something else."""
    replace(world.fake, "1", labels)
    for _ in range(2):
        assert named(await world.detect()) == ("1", labels.split(","))
    replace(world.fake)
    for _ in range(2):
        assert named(await world.detect()) == ("2", ["new", "other"])

    assert len(world.fake.requests) == requests


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


async def test_model_that_is_replaced_all_the_time_is_not_ready(world: World) -> None:
    await world.detect()
    world.fake.answer.model_version = "2"
    with pytest.raises(ModelNotReady, match="being replaced"):
        await world.detect()

    assert len(world.fake.requests) == 4


@pytest.mark.parametrize(
    ("config", "references"),
    [
        (CONFIG, {None: "tiny", 3: "tiny", "3": "tiny", 1: "tiny:1"}),
        (config_with(default_version="1"), {None: "tiny:1", 3: "tiny:3", "1": "tiny:1", 1: "tiny:1"}),
    ],
)
async def test_version_has_one_reference(world: World, config: dict[str, Any], references: dict[int | str | None, str]) -> None:
    world.fake.config, world.fake.model_versions = config, ["1", "2", "3"]
    assert [world.pipeline.refer_to("tiny", version) for version in (None, 3)] == ["tiny", "tiny:3"]
    await world.pipeline.spec("tiny")

    assert {version: world.pipeline.refer_to("tiny", version) for version in references} == references


async def test_name_asks_for_the_default_version_until_the_repository_changes(world: World) -> None:
    world.fake.config, world.fake.model_versions = config_with(default_version="1", labels="old,old"), ["1", "2"]
    assert named(await world.detect()) == ("1", ["old", "old"])
    world.fake.config = config_with(default_version="2", labels="new,other")
    await world.pipeline.refresh()
    assert named(await world.detect()) == ("1", ["old", "old"])
    world.changed_at = 1
    await world.pipeline.refresh()
    await eventually(lambda: world.pipeline.refer_to("tiny", None) == "tiny:2")

    assert named(await world.detect()) == ("2", ["new", "other"])
    assert [request.model_version for request in world.fake.requests] == ["1", "1", "2"]


async def test_default_version_that_was_unloaded_is_replaced_by_the_next_request(world: World) -> None:
    """Without a change of the repository, as in a Triton elsewhere."""
    world.fake.config, world.fake.model_versions = config_with(default_version="1"), ["1", "2"]
    await world.detect()
    world.fake.config, world.fake.model_versions = config_with(default_version="2"), ["2"]
    world.fake.next_refusals = [refusals.NOT_LOADED]
    with pytest.raises(ModelNotReady):
        await world.detect()

    assert (await world.detect()).version == "2"


async def test_name_is_that_of_a_model_once_somebody_knows_it(world: World) -> None:
    assert [world.pipeline.is_known(name) for name in ("tiny", "listed", "other", "")] == [True, True, False, False]
    await world.detect(model="other")

    assert world.pipeline.is_known("other")


@pytest.mark.parametrize(
    ("model", "detail"),
    [
        (None, "Triton does not have tiny, a default model of the settings; it has other, yolo"),
        ("listed", "Triton does not have listed; get it with `nereid pull listed` or `./just pull listed`"),
        ("yolov", "there is no such model; did you mean yolo? GET /models lists those that exist"),
        ("litsed", "there is no such model; did you mean listed? GET /models lists those that exist"),
        ("borken", "there is no such model; GET /models lists those that exist"),
    ],
)
async def test_unknown_model_is_told_what_there_is(world: World, model: str | None, detail: str) -> None:
    world.fake.index = [("yolo", "1", "READY", ""), ("other", "1", "READY", ""), ("broken", "1", "UNAVAILABLE", "no weights")]
    world.fake.model_refusal = refusals.GONE
    with pytest.raises(UnknownModel) as caught:
        await world.detect(model=model)

    assert caught.value.detail == detail


async def test_invalid_option_is_rejected_before_the_image_is_decoded(world: World) -> None:
    with pytest.raises(InvalidParameter, match="unicorn"):
        await world.detect(b"not an image", classes=["unicorn"])

    assert not world.fake.requests
    assert world.used_bytes == 0


@pytest.mark.parametrize(
    ("step", "config", "image_format", "options", "is_threaded"),
    [
        ("fill_input", CONFIG, "BMP", {}, True),
        ("fill_input", CONFIG, "JPEG", {}, True),
        ("fill_input", CONFIG | FILE, "JPEG", {}, False),  # only its header is read; Pillow may take longer for others
        ("fill_input", CONFIG | FILE, "PNG", {}, True),
        ("decode_boxes", CONFIG, "BMP", {}, False),
        ("decode_boxes", CONFIG, "BMP", {"iou": 0.5}, True),
        ("decode_boxes", CONFIG, "BMP", {"agnostic": True}, True),
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


async def test_known_model_is_ready_without_a_question_once_it_has_slots(world: World) -> None:
    await world.pipeline.spec("tiny")
    assert not world.fake.registrations
    spec = await world.pipeline.prepare("tiny", Deadline.after(5))

    assert await world.pipeline.prepare("tiny", Deadline.after(-1)) is spec
    assert world.fake.config_reads == 1
    assert len(world.fake.registrations) == 1
    assert is_mapped(world.transport)


@pytest.mark.parametrize("step", ["may_tell", "may_map"])
async def test_triton_that_does_not_answer_in_time_is_a_missed_deadline(world: World, step: str) -> None:
    getattr(world.fake, step).clear()
    with pytest.raises(DeadlinePassed, match="did not answer in time"):
        await world.detect(seconds=0.1)


async def test_model_whose_circuit_is_open_is_not_asked(world: World) -> None:
    await world.detect()
    circuit = world.server.model("tiny").circuit
    assert circuit is not None
    circuit.open()
    for model in (None, "tiny"):
        with pytest.raises(CircuitOpen):
            await world.detect(b"not an image", model=model)

    assert world.used_bytes == 0
    assert len((await world.detect(model="other")).scores) == 2


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


@pytest.mark.world(memory_bytes=2**20)
async def test_decoding_needs_memory_but_not_for_a_file_that_triton_decodes(world: World) -> None:
    large = png(600, 600, 8, GREY)
    with pytest.raises(GatewayFull, match="no memory left for an image of this size"):
        await world.detect(large)
    assert world.used_bytes == 0
    assert world.free_slots() == SLOTS
    world.fake.config = CONFIG | FILE

    assert (await world.detect(large, model="other")).width == 600


@pytest.mark.world(memory_bytes=2000)
async def test_body_needs_memory_while_triton_does_not_answer(world: World) -> None:
    world.fake.may_tell.clear()
    waiting = [asyncio.ensure_future(world.detect(bytes(1000))) for _ in range(2)]
    await eventually(lambda: world.used_bytes == 2000)
    with pytest.raises(GatewayFull, match="no memory left"):
        await world.detect(bytes(1000))
    await world.leave(waiting)

    assert world.used_bytes == 0


async def test_large_image_that_would_be_decoded_too_late_is_rejected_at_once(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate
) -> None:
    large = png(3000, 3000, 8, GREY)
    gate.block(monkeypatch, preprocess, "fill_input")
    running = [asyncio.ensure_future(world.detect(large))]
    await eventually(gate.reached.is_set)
    with pytest.raises(GatewayFull, match="decoding the image, and those before it"):
        await world.detect(large, seconds=0.2)
    running += [asyncio.ensure_future(world.detect(data)) for data in (large, SCENE)]
    await eventually(lambda: world.admission.decode_backlog.pixels == 2 * 9_000_000)
    gate.opened.set()
    outcomes = await asyncio.gather(*running, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [InvalidImage, InvalidImage, Detections]
    assert world.admission.decode_backlog.pixels == 0


async def test_priority_of_the_caller_reaches_triton(world: World) -> None:
    world.fake.config = CONFIG | {"dynamic_batching": {"priority_levels": "3", "default_priority_level": "2"}}
    for priority in (HIGH, NORMAL, LOW):
        await world.detect(caller=Caller("", priority=priority))

    assert [request.parameters["priority"].uint64_param for request in world.fake.requests] == [1, 0, 3]


def test_time_of_a_request_is_chosen_by_its_caller_or_grows_with_its_images() -> None:
    """The maximum for callers does not limit the default."""
    assert [LIMITS.timeout(None, images) for images in (0, 1, 2, 21, 41, 64)] == [10, 10, 10.5, 20, 30, 30]
    assert [LIMITS.timeout(1500), LIMITS.timeout(30_000), LIMITS.timeout(1500, 64)] == [1.5, 30, 1.5]
    assert [LIMITS._replace(timeout_seconds=60).timeout(None, images) for images in (1, 64)] == [60, 60]
    with pytest.raises(InvalidParameter, match=r"^timeout_ms: the maximum is 30000$"):
        LIMITS.timeout(30_001)


async def test_warming_up_measures_the_model(world: World) -> None:
    await world.pipeline.warm_up()

    assert [request.id for request in world.fake.requests] == ["warm-up"]
    assert world.admission.queues["tiny"].pace() > 0
