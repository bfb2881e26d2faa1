"""The whole pipeline: steps, threads, deadlines, memory and slots."""

import asyncio
import threading
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import grpc
import msgspec
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
    TritonUnavailable,
    UnknownModel,
)
from app.main import create_app
from app.pipeline import call as call_module
from app.pipeline import preprocess
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.settings.schema import Settings
from app.telemetry.timing import Timing
from app.triton import shared_memory
from app.triton.shared_memory import SLOTS
from tests.fakes import models
from tests.fakes.triton import CONFIG, FakeTriton, config_with, infer_response, serving
from tests.imaging.samples import GREY, png
from tests.pipeline.gate import Gate
from tests.support import LIMITS, SCENE, eventually, finds, is_mapped, json, started
from tests.world import OPTIONS, World, open_world

TABLE = np.array([[8, 16, 16, 24, 0.5, 1], [0, 8, 32, 24, 0.75, 0]], np.float32)
"""Two rows in pixels of the 32 x 32 canvas. The image of 200 x 100 covers 32 x 16 of it."""
FOUR = {"count": np.array([1], np.int32), "boxes": TABLE[:, :4], "scores": TABLE[:, 4], "classes": TABLE[:, 5].astype(np.int32)}
YOLO_HEAD = np.zeros((6, 21), np.float32)
YOLOX_HEAD = np.zeros((21, 7), np.float32)


def outputs_config(**outputs: NDArray[Any]) -> dict[str, Any]:
    types = {"float32": "TYPE_FP32", "int32": "TYPE_INT32"}
    return {
        **CONFIG,
        "output": [
            {"name": name, "data_type": types[tensor.dtype.name], "dims": list(tensor.shape)} for name, tensor in outputs.items()
        ],
    }


def in_which_threads(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[str]:
    """Record the names of the threads in which a step of the pipeline runs."""
    threads: list[str] = []
    step = getattr(module, name)

    def noted(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        name = threading.current_thread().name
        if not name.startswith("asyncio"):  # in which a gateway of another test may still read an answer to the golden picture
            threads.append(name)
        return step(*arguments, **keywords)

    monkeypatch.setattr(module, name, noted)
    return threads


@pytest.fixture
async def world(world: World) -> World:
    world.fake.answer = infer_response(output0=TABLE)
    return world


async def test_an_image_becomes_detections(world: World) -> None:
    world.fake.model_versions = ["7"]
    found = await world.detect()

    assert found.boxes.tolist() == [[0, 0, 200, 100], [50, 50, 100, 100]]
    assert found.scores.tolist() == [0.75, 0.5]
    assert found.class_ids.tolist() == [0, 1]
    assert (found.width, found.height) == models.SIZE
    assert (found.spec.name, found.version) == ("tiny", "7")


def replace(fake: FakeTriton, version: str = "2", labels: str = "new,other", **config: Any) -> None:  # noqa: ANN401
    fake.config = {**CONFIG, **config, "parameters": {"labels": {"string_value": labels}}}
    fake.model_versions = [version]


def named(found: Detections) -> tuple[str, list[str]]:
    """Return the version that answered, and the class names of the detections."""
    return found.version, [found.spec.class_name(class_id) for class_id in found.class_ids]


async def test_an_answer_has_the_labels_of_the_version_that_gave_it(world: World) -> None:
    """This includes the first answer after a replacement, because the request starts over with the new version."""
    replace(world.fake, "1", "old,old")
    assert named(await world.detect()) == ("1", ["old", "old"])
    replace(world.fake)

    assert named(await world.detect()) == ("2", ["new", "other"])
    assert len(world.fake.requests) == 3
    assert named(await world.detect()) == ("2", ["new", "other"])
    assert len(world.fake.requests) == 4


async def test_a_version_with_the_same_labels_is_not_asked_twice(world: World) -> None:
    await world.detect()
    world.fake.model_versions = ["2"]

    assert (await world.detect()).version == "2"
    assert len(world.fake.requests) == 2


async def test_a_version_of_another_size_is_asked_with_an_image_of_that_size(world: World) -> None:
    await world.detect()
    replace(world.fake, input=[{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}])
    world.fake.next_refusals = [(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input")]

    assert named(await world.detect()) == ("2", ["new", "other"])
    assert [list(request.inputs[0].shape) for request in world.fake.requests][1:] == [[32, 32, 3], [64, 64, 3]]


async def test_a_triton_that_was_restarted_may_have_other_labels_under_the_same_version() -> None:
    old, new = FakeTriton(), FakeTriton()
    for fake, labels in ((old, "old,old"), (new, "new,other")):
        fake.answer = infer_response(output0=TABLE)
        replace(fake, "1", labels)
    async with AsyncExitStack() as running:
        port = await running.enter_async_context(serving(old))
        async with open_world(old) as world:
            assert named(await world.detect()) == ("1", ["old", "old"])
            await running.aclose()
            async with serving(new, port):
                await eventually(lambda: world.client.connection == 2)

                assert named(await world.detect()) == ("1", ["new", "other"])


async def test_an_image_of_a_batch_is_detected_anew(world: World) -> None:
    replace(world.fake, "1", "old,old")
    await world.detect()
    call = CallContext(Deadline.after(30), Timing(), "abc")
    batch = await BatchRequest.open(world.pipeline, [SCENE], OPTIONS, call)
    replace(world.fake)

    async def keep(_: int, found: Detections | Exception, __: Timing) -> Detections | Exception:
        return found

    async with batch.run(keep) as results:
        (found,) = [await result for result in results]

    assert isinstance(found, Detections)
    assert named(found) == ("2", ["new", "other"])


async def test_a_model_that_is_replaced_all_the_time_is_not_ready(world: World) -> None:
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
async def test_a_version_has_one_reference(world: World, config: dict[str, Any], references: dict[int | str | None, str]) -> None:
    world.fake.config, world.fake.model_versions = config, ["1", "2", "3"]
    assert [world.pipeline.refer_to("tiny", version) for version in (None, 3)] == ["tiny", "tiny:3"]
    await world.pipeline.spec("tiny")

    assert {version: world.pipeline.refer_to("tiny", version) for version in references} == references


async def test_a_name_asks_for_the_default_version(world: World) -> None:
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


async def test_a_default_version_that_was_unloaded_is_replaced_by_the_next_request(world: World) -> None:
    """Without a change of the repository, as in a Triton elsewhere."""
    world.fake.config, world.fake.model_versions = config_with(default_version="1"), ["1", "2"]
    await world.detect()
    world.fake.config, world.fake.model_versions = config_with(default_version="2"), ["2"]
    world.fake.next_refusals = [(grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' version 1 is not at ready state")]
    with pytest.raises(ModelNotReady):
        await world.detect()

    assert (await world.detect()).version == "2"


async def test_a_name_is_that_of_a_model_once_somebody_knows_it(world: World) -> None:
    """The name is known if it is the default model, can be pulled, or Triton has had it."""
    assert [world.pipeline.is_known(name) for name in ("tiny", "listed", "other", "")] == [True, True, False, False]
    await world.detect(model="other")

    assert world.pipeline.is_known("other")


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({"confidence": 0.6}, [0.75]),
        ({"classes": ["1"]}, [0.5]),
        ({"max_detections": 1}, [0.75]),
        ({"confidence": 0.9}, []),
        ({"iou": 0.1}, [0.75, 0.5]),
        ({"iou": 0.13, "agnostic": True}, [0.75, 0.5]),
        ({"iou": 0.12, "agnostic": True}, [0.75]),
        ({"iou": 0.12, "agnostic": True, "classes": ["1"]}, [0.5]),
    ],
)
async def test_only_the_detections_asked_for_are_returned(world: World, options: dict[str, Any], scores: list[float]) -> None:
    """The intersection of the two boxes is 1/8 of their union."""
    found = await world.detect(**options)

    assert found.scores.tolist() == scores
    assert found.boxes.shape == (len(scores), 4)


@pytest.mark.parametrize("box", [(0, 0, 32, 8), (20, 10, 10, 20)], ids=["in the padding", "inverted"])
async def test_a_box_without_an_area_in_the_image_is_dropped(world: World, box: tuple[int, int, int, int]) -> None:
    """It does not count towards the maximum number of detections, however high its score."""
    world.fake.answer = infer_response(output0=np.array([[*box, 0.9, 0], TABLE[1]], np.float32))

    found = await world.detect(max_detections=1)

    assert found.scores.tolist() == [TABLE[1, 4]]


async def test_an_unknown_class_is_rejected_before_the_image_is_decoded(world: World) -> None:
    with pytest.raises(InvalidParameter, match="unicorn"):
        await world.detect(b"not an image", classes=["unicorn"])

    assert not world.fake.requests


async def test_every_step_is_timed(world: World) -> None:
    timing = Timing()
    await world.detect(timing=timing)

    assert list(timing.stages) == ["model", "queue", "decode", "batch", "infer", "post"]


@pytest.mark.parametrize("image_format", ["BMP", "JPEG"])
async def test_pixels_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, world: World, image_format: str) -> None:
    """Milliseconds on the event loop would delay every other request."""
    threads = in_which_threads(monkeypatch, preprocess, "fill_input")
    await world.detect(models.scene(image_format))

    assert [name.startswith("decode") for name in threads] == [True]


@pytest.mark.parametrize(("image_format", "is_threaded"), [("JPEG", False), ("PNG", True), ("BMP", True), ("GIF", True)])
async def test_a_quick_header_is_read_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    image_format: str,
    is_threaded: bool,  # noqa: FBT001
) -> None:
    """For encoded files, a thread costs more than reading a JPEG header. Pillow may take longer for other headers."""
    file = {"name": "file", "data_type": "TYPE_STRING", "dims": [1]}
    world.fake.config = {**CONFIG, "input": [file], "parameters": {"square": {"string_value": "32"}}}
    threads = in_which_threads(monkeypatch, preprocess, "fill_input")
    timing = Timing()
    found = await world.detect(models.scene(image_format), timing=timing)

    assert found.scores.tolist() == [0.75, 0.5]
    assert [name.startswith("decode") for name in threads] == [is_threaded]
    assert list(timing.stages) == ["model", "queue", "decode", "batch", "infer", "post"]


@pytest.mark.parametrize(
    ("outputs", "is_threaded"),
    [({"head": YOLO_HEAD}, True), ({"head": YOLOX_HEAD}, True), ({"table": TABLE}, False), (FOUR, False)],
    ids=["yolo head", "yolox head", "six columns", "end to end"],
)
async def test_a_raw_head_is_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    outputs: dict[str, NDArray[Any]],
    is_threaded: bool,  # noqa: FBT001
) -> None:
    """Decoding it takes milliseconds. Other outputs take so little time that a thread would cost more."""
    world.fake.config = outputs_config(**outputs)
    world.fake.answer = infer_response(**outputs)
    threads = in_which_threads(monkeypatch, call_module, "decode_boxes")
    await world.detect()

    assert [name.startswith("decode") for name in threads] == [is_threaded]


@pytest.mark.parametrize("options", [{"iou": 0.5}, {"agnostic": True}])
async def test_boxes_are_suppressed_in_a_thread(monkeypatch: pytest.MonkeyPatch, world: World, options: dict[str, Any]) -> None:
    """Suppression of hundreds of boxes would block the event loop for too long."""
    threads = in_which_threads(monkeypatch, call_module, "decode_boxes")
    await world.detect(**options)

    assert [name.startswith("decode") for name in threads] == [True]


async def test_a_model_that_suppresses_boxes_is_not_asked_for_more(world: World) -> None:
    world.fake.config = outputs_config(**FOUR)
    with pytest.raises(InvalidParameter, match=r"^iou: the model itself drops boxes that overlap by more than 0\.7, the maximum$"):
        await world.detect(b"no image", iou=0.71)

    assert not world.fake.requests
    assert world.admission.memory.own_bytes == 0


async def test_an_output_that_does_not_fit_the_config_is_invalid(world: World) -> None:
    world.fake.answer = infer_response(output0=TABLE[:, :5])
    with pytest.raises(InvalidModelOutput, match="tiny"):
        await world.detect()

    assert world.free_slots() == SLOTS


async def test_a_broken_image_never_reaches_triton(world: World) -> None:
    with pytest.raises(InvalidImage):
        await world.detect(SCENE[:500])

    assert not world.fake.requests
    assert world.free_slots() == SLOTS


async def test_a_known_model_is_ready_without_a_question(world: World) -> None:
    spec = await world.pipeline.prepare("tiny", Deadline.after(5))

    assert await world.pipeline.prepare("tiny", Deadline.after(-1)) is spec
    assert world.fake.config_reads == 1
    assert len(world.fake.registrations) == 1
    assert is_mapped(world.transport)


async def test_a_model_is_not_ready_while_its_slots_are_missing(world: World) -> None:
    await world.pipeline.spec("tiny")
    assert not world.fake.registrations
    await world.pipeline.prepare("tiny", Deadline.after(5))

    assert len(world.fake.registrations) == 1


@pytest.mark.parametrize("step", ["may_tell", "may_map"])
async def test_a_triton_that_does_not_answer_in_time_is_a_missed_deadline(world: World, step: str) -> None:
    getattr(world.fake, step).clear()
    with pytest.raises(DeadlinePassed, match="did not answer in time"):
        await world.detect(seconds=0.1)


@pytest.mark.parametrize(
    ("model", "detail"), [("listed", "./just pull listed"), ("other", "there is no such model; GET /models lists")]
)
async def test_a_model_that_could_be_pulled_says_how(world: World, model: str, detail: str) -> None:
    world.fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"

    with pytest.raises(UnknownModel, match=detail) as caught:
        await world.detect(model=model)
    assert ("pull" in caught.value.detail) is (model == "listed")


async def test_a_default_model_that_is_not_there_names_those_that_are(world: World) -> None:
    """Its name may be misspelt in the settings."""
    world.fake.index = [("yolo", "1", "READY", ""), ("other", "1", "READY", ""), ("broken", "1", "UNAVAILABLE", "no weights")]
    world.fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"
    with pytest.raises(UnknownModel, match=r"^Triton does not have tiny, a default model of the settings; it has other, yolo$"):
        await world.detect()
    for model, hint in (("nothing", ";"), ("yolov", "; did you mean yolo?"), ("borken", ";"), ("litsed", "; did you mean listed?")):
        with pytest.raises(UnknownModel) as caught:
            await world.detect(model=model)
        assert caught.value.detail == f"there is no such model{hint} GET /models lists those that exist"


async def test_a_request_that_waits_for_a_thread_until_its_deadline_is_dropped(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate
) -> None:
    gate.block(monkeypatch, preprocess, "fill_input")
    blocking = asyncio.ensure_future(world.detect())
    await eventually(gate.reached.is_set)
    with pytest.raises(DeadlinePassed):
        await world.detect(seconds=0.1)
    assert world.free_slots() == SLOTS
    gate.opened.set()
    await blocking

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
    assert world.free_slots() == SLOTS - 1
    asyncio.get_running_loop().call_soon(world.let_answer)
    threading.Timer(0.1, gate.opened.set).start()
    await world.pipeline.close()

    assert gate.opened.is_set()
    assert world.fake.may_answer.is_set()
    await eventually(lambda: world.used_bytes == 0)
    assert world.free_slots() == SLOTS


@pytest.mark.world(max_requests=1)
async def test_a_request_above_the_limit_is_rejected(world: World) -> None:
    world.hold()
    first = asyncio.ensure_future(world.detect())
    await eventually(lambda: len(world.fake.requests) == 1)
    with pytest.raises(GatewayFull):
        await world.detect(b"not an image")
    world.let_answer()

    assert len((await first).scores) == 2
    assert len((await world.detect()).scores) == 2
    assert len(world.fake.requests) == 2


@pytest.mark.world(max_requests=1)
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_request_counts_until_its_rpc_has_ended(world: World, how: str) -> None:
    """Triton is still busy with it, so no other request is admitted before."""
    world.hold()
    asking = asyncio.ensure_future(world.detect())
    await eventually(lambda: len(world.fake.requests) == 1)
    if how == "deadline":
        await world.time.skip(30)
    else:
        asking.cancel()
    with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
        await asking
    with pytest.raises(GatewayFull):
        world.admission.check("tiny")
    assert world.used_bytes > 0
    world.let_answer()

    await eventually(lambda: world.used_bytes == 0)
    world.admission.check("tiny")


async def test_a_request_that_is_cancelled_in_the_queue_is_never_decoded(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate
) -> None:
    gate.block(monkeypatch, preprocess, "fill_input")
    blocking = asyncio.ensure_future(world.detect())
    await eventually(gate.reached.is_set)
    before = world.used_bytes
    waiting = asyncio.ensure_future(world.detect())
    await eventually(lambda: world.used_bytes > before)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert world.used_bytes == before
    gate.opened.set()
    await blocking

    assert len(world.fake.requests) == 1


async def test_a_model_that_fails_repeatedly_is_not_asked_again(world: World) -> None:
    world.fake.refusal = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
    for _ in range(5):
        with pytest.raises(TritonUnavailable):
            await world.detect()
    assert not world.pipeline.tritons.is_usable("tiny")
    for model in (None, "tiny"):
        with pytest.raises(CircuitOpen):
            await world.detect(b"not an image", model=model)
    with pytest.raises(CircuitOpen):
        world.pipeline.check_circuit("tiny")
    assert world.used_bytes == 0
    world.pipeline.check_circuit("other")
    world.fake.refusal = None
    assert len((await world.detect(model="other")).scores) == 2

    await eventually(lambda: world.pipeline.tritons.is_usable("tiny"))
    assert len((await world.detect()).scores) == 2


@pytest.mark.world(memory_bytes=2**20)
async def test_decoding_needs_memory(world: World) -> None:
    with pytest.raises(GatewayFull, match="no memory left for an image of this size"):
        await world.detect(png(1000, 1000, 8, GREY))
    assert world.used_bytes == 0
    assert world.free_slots() == SLOTS

    assert len((await world.detect()).scores) == 2
    assert world.used_bytes == 0


@pytest.mark.world(memory_bytes=2000)
async def test_a_body_needs_memory_while_triton_does_not_answer(world: World) -> None:
    body = bytes(1000)
    world.fake.may_tell.clear()
    waiting = [asyncio.ensure_future(world.detect(body)) for _ in range(2)]
    await eventually(lambda: world.used_bytes == 2 * len(body))
    with pytest.raises(GatewayFull, match="no memory left"):
        await world.detect(body)
    await world.leave(waiting)

    assert world.used_bytes == 0


@pytest.mark.world(memory_bytes=2**21)
async def test_a_file_that_triton_decodes_needs_no_memory_for_its_pixels(world: World) -> None:
    file = {"name": "file", "data_type": "TYPE_STRING", "dims": [1]}
    world.fake.config = {**CONFIG, "input": [file], "parameters": {"square": {"string_value": "32"}}}

    assert (await world.detect(png(1000, 1000, 8, GREY))).width == 1000


async def test_a_large_image_that_would_be_decoded_too_late_is_rejected_at_once(
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


def test_the_caller_may_choose_the_time_of_a_request() -> None:
    """The maximum for callers does not limit the default."""
    assert LIMITS.timeout(None) == 10
    assert LIMITS.timeout(1500) == 1.5
    assert LIMITS.timeout(30_000) == 30
    with pytest.raises(InvalidParameter, match=r"^timeout_ms: the maximum is 30000$"):
        LIMITS.timeout(30_001)
    assert LIMITS._replace(timeout_seconds=60).timeout(None) == 60


def test_a_batch_has_more_time_for_each_image() -> None:
    assert [LIMITS.timeout(None, images) for images in (0, 1, 2, 21, 41, 64)] == [10, 10, 10.5, 20, 30, 30]
    assert LIMITS.timeout(1500, 64) == 1.5
    assert LIMITS._replace(timeout_seconds=60).timeout(None, 64) == 60


async def test_warming_up_measures_the_model(world: World) -> None:
    await world.pipeline.warm_up()

    assert [request.id for request in world.fake.requests] == ["warm-up"]
    assert world.admission.queues["tiny"].pace() > 0


async def test_a_model_that_cannot_be_warmed_up_is_an_error(world: World) -> None:
    world.fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    with pytest.raises(TritonUnavailable):
        await world.pipeline.warm_up()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_slot_is_free_only_when_its_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate, how: str
) -> None:
    """A decoder cannot be stopped, so no other image may use the slot before."""
    gate.block(monkeypatch, preprocess, "decode")
    asking = asyncio.ensure_future(world.detect())
    await eventually(gate.reached.is_set)
    assert world.free_slots() == SLOTS - 1
    if how == "deadline":
        await world.time.skip(30)
    else:
        asking.cancel()
    with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
        await asking
    assert world.free_slots() == SLOTS - 1
    gate.opened.set()

    await eventually(lambda: world.free_slots() == SLOTS)


@pytest.mark.usefixtures("triton")
async def test_broken_images_leave_slots_to_others(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOTS", 2)
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        for _ in range(5):
            json(await client.post("/predict/six_columns", content=SCENE[:500]), 422)

        assert await finds(client)
