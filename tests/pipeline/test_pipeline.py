"""The whole job: steps in order, each in its place, under one deadline, with nothing kept afterwards."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.config import Settings
from app.embedded.server import EmbeddedTriton
from app.errors import (
    CircuitOpen,
    DeadlinePassed,
    GatewayFull,
    InvalidImage,
    InvalidModelOutput,
    InvalidParameter,
    TritonUnavailable,
    UnknownModel,
)
from app.imaging import canvas
from app.main import create_app
from app.pipeline import call as call_module
from app.pipeline import pipeline as pipeline_module
from app.pipeline.call import CallContext, Detections, DetectOptions
from app.pipeline.pipeline import Pipeline
from app.resilience.admission import Share
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton import arena_size
from app.triton.arena_size import SLOTS
from app.triton.client import TritonClient
from app.triton.transport import Transport
from tests.fakes import models
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, infer_response
from tests.imaging.samples import GREY, png
from tests.pipeline.gate import Gate
from tests.support import AGGREGATION, LIMITS, METRICS, SCENE, eventually, finds, json, open_admission, pool_of, started

Fake = tuple[FakeTriton, TritonClient]

OPTIONS = DetectOptions(None, 0.25, None, 100)
TABLE = np.array([[8, 16, 16, 24, 0.5, 1], [0, 8, 32, 24, 0.75, 0]], np.float32)
"""Two rows in the 32 x 32 canvas, on which the image of 200 x 100 covers 32 x 16."""
FOUR = {"count": np.array([1], np.int32), "boxes": TABLE[:, :4], "scores": TABLE[:, 4], "classes": TABLE[:, 5].astype(np.int32)}
YOLO_HEAD = np.zeros((6, 21), np.float32)
YOLOX_HEAD = np.zeros((21, 7), np.float32)


def outputs_config(**outputs: NDArray[Any]) -> dict[str, Any]:
    """Make the config of a model with these outputs."""
    types = {"float32": "TYPE_FP32", "int32": "TYPE_INT32"}
    return {
        **CONFIG,
        "output": [
            {"name": name, "data_type": types[tensor.dtype.name], "dims": list(tensor.shape)} for name, tensor in outputs.items()
        ],
    }


def in_which_threads(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[str]:
    """Note the names of the threads in which a step of the pipeline runs."""
    threads: list[str] = []
    step = getattr(module, name)

    def noted(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        threads.append(threading.current_thread().name)
        return step(*arguments, **keywords)

    monkeypatch.setattr(module, name, noted)
    return threads


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    """A transport, which the pipeline's pool attaches to the fake Triton."""
    made = Transport("auto")
    yield made
    await made.close()


@pytest.fixture
async def pipeline(fake_triton: Fake, transport: Transport) -> AsyncIterator[Pipeline]:
    """A pipeline with one thread, on a fake Triton that finds `TABLE`."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    with open_admission() as admission:
        made = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset({"listed"}), LIMITS, AGGREGATION)
        yield made
        fake.may_answer.set()
        await made.close()


async def detect(
    pipeline: Pipeline,
    data: bytes = SCENE,
    *,
    options: DetectOptions = OPTIONS,
    seconds: float = 30,
    timing: Timing | None = None,
) -> Detections:
    """Detect with what most tests do not care about."""
    return await pipeline.run(data, options, CallContext(Deadline.after(seconds), timing or Timing(), "abc"))


def free_slots(transport: Transport, nbytes: int = SPEC.image_bytes) -> int:
    """Count the free slots of a size."""
    slot = transport.take(nbytes, nbytes)
    assert slot
    slot.free()
    return (slot.arena.nbytes - slot.arena.lent_bytes) // nbytes


async def test_an_image_becomes_detections(fake_triton: Fake, pipeline: Pipeline) -> None:
    """Boxes are in pixels of the image and clipped to it, the best first; the model that answered is named."""
    fake, _ = fake_triton
    fake.answer.model_version = "7"
    found = await detect(pipeline)

    assert found.boxes.tolist() == [[0, 0, 200, 100], [50, 50, 100, 100]]
    assert found.scores.tolist() == [0.75, 0.5]
    assert found.class_ids.tolist() == [0, 1]
    assert (found.width, found.height) == models.SIZE
    assert (found.spec.name, found.version) == ("tiny", "7")


async def test_triton_is_asked_with_the_id_and_the_rest_of_the_time(fake_triton: Fake, pipeline: Pipeline) -> None:
    """The time that earlier steps have used is subtracted."""
    fake, _ = fake_triton
    await detect(pipeline, seconds=5)
    (request,) = fake.requests

    assert request.id == "abc"
    assert 0 < request.parameters["timeout"].int64_param < 5_000_000
    assert "shared_memory_region" in request.inputs[0].parameters


async def test_a_name_is_that_of_a_model_once_somebody_knows_it(pipeline: Pipeline) -> None:
    """It is the default one, or could be pulled, or Triton has had it."""
    assert [pipeline.is_known(name) for name in ("tiny", "listed", "other", "")] == [True, True, False, False]
    await detect(pipeline, options=OPTIONS._replace(model="other"))

    assert pipeline.is_known("other")


async def test_triton_is_told_of_the_trace(fake_triton: Fake, pipeline: Pipeline) -> None:
    """A request that belongs to one passes it on."""
    fake, _ = fake_triton
    trace = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)
    await pipeline.run(SCENE, OPTIONS, CallContext(Deadline.after(30), Timing(), "abc", trace=trace))

    assert [metadata["traceparent"] for metadata in fake.metadata] == [trace.traceparent]


@pytest.mark.parametrize(("model", "asked"), [(None, "tiny"), ("other", "other")])
async def test_the_default_model_is_asked_unless_another_is_named(
    fake_triton: Fake, pipeline: Pipeline, model: str | None, asked: str
) -> None:
    """The detections say which one it was."""
    fake, _ = fake_triton
    found = await detect(pipeline, options=OPTIONS._replace(model=model))

    assert fake.requests[0].model_name == found.spec.name == asked


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        (OPTIONS._replace(confidence=0.6), [0.75]),
        (OPTIONS._replace(classes=["1"]), [0.5]),
        (OPTIONS._replace(max_detections=1), [0.75]),
        (OPTIONS._replace(confidence=0.9), []),
        (OPTIONS._replace(iou=0.1), [0.75, 0.5]),
        (OPTIONS._replace(iou=0.13, agnostic=True), [0.75, 0.5]),
        (OPTIONS._replace(iou=0.12, agnostic=True), [0.75]),
        (OPTIONS._replace(iou=0.12, agnostic=True, classes=["1"]), [0.5]),
    ],
)
async def test_only_the_detections_asked_for_are_returned(pipeline: Pipeline, options: DetectOptions, scores: list[float]) -> None:
    """Confidence, overlap, classes and maximum number are those of the options. The intersection of both is 1/8 of their union."""
    found = await detect(pipeline, options=options)

    assert found.scores.tolist() == scores
    assert found.boxes.shape == (len(scores), 4)


@pytest.mark.parametrize("box", [(0, 0, 32, 8), (20, 10, 10, 20)], ids=["in the padding", "inverted"])
async def test_a_box_without_an_area_in_the_image_is_dropped(
    fake_triton: Fake, pipeline: Pipeline, box: tuple[int, int, int, int]
) -> None:
    """However high its score, it takes no place of one that shows something."""
    fake, _ = fake_triton
    fake.answer = infer_response(output0=np.array([[*box, 0.9, 0], TABLE[1]], np.float32))

    found = await detect(pipeline, options=OPTIONS._replace(max_detections=1))

    assert found.scores.tolist() == [TABLE[1, 4]]


async def test_an_unknown_class_is_rejected_before_the_image_is_decoded(fake_triton: Fake, pipeline: Pipeline) -> None:
    """Neither a thread nor Triton is bothered."""
    fake, _ = fake_triton
    with pytest.raises(InvalidParameter, match="unicorn"):
        await detect(pipeline, b"not an image", options=OPTIONS._replace(classes=["unicorn"]))

    assert not fake.requests


async def test_every_step_is_timed(pipeline: Pipeline) -> None:
    """The stages are in the order in which a request passes them."""
    timing = Timing()
    await detect(pipeline, timing=timing)

    assert list(timing.stages) == ["model", "queue", "decode", "batch", "infer", "post"]


@pytest.mark.parametrize("image_format", ["BMP", "JPEG"])
async def test_pixels_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, image_format: str) -> None:
    """Milliseconds on the event loop would delay every other request."""
    threads = in_which_threads(monkeypatch, pipeline_module, "fill_input")
    await detect(pipeline, models.scene(image_format))

    assert [name.startswith("decode") for name in threads] == [True]


@pytest.mark.parametrize(("image_format", "is_threaded"), [("JPEG", False), ("PNG", True), ("BMP", True), ("GIF", True)])
async def test_a_quick_header_is_read_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    fake_triton: Fake,
    pipeline: Pipeline,
    image_format: str,
    is_threaded: bool,  # noqa: FBT001
) -> None:
    """For a model that takes the file; handing it to a thread would take longer. Pillow's headers may take long."""
    fake, _ = fake_triton
    file = {"name": "file", "data_type": "TYPE_STRING", "dims": [1]}
    fake.config = {**CONFIG, "input": [file], "parameters": {"square": {"string_value": "32"}}}
    threads = in_which_threads(monkeypatch, pipeline_module, "fill_input")
    timing = Timing()
    found = await detect(pipeline, models.scene(image_format), timing=timing)

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
    fake_triton: Fake,
    pipeline: Pipeline,
    outputs: dict[str, NDArray[Any]],
    is_threaded: bool,  # noqa: FBT001
) -> None:
    """It takes milliseconds of numpy; final detections take so little that a thread would cost more."""
    fake, _ = fake_triton
    fake.config = outputs_config(**outputs)
    fake.answer = infer_response(**outputs)
    threads = in_which_threads(monkeypatch, call_module, "decode_boxes")
    found = await detect(pipeline)

    assert found.spec.head.is_heavy is is_threaded
    assert [name.startswith("decode") for name in threads] == [is_threaded]


@pytest.mark.parametrize("options", [OPTIONS._replace(iou=0.5), OPTIONS._replace(agnostic=True)])
async def test_boxes_are_suppressed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, options: DetectOptions
) -> None:
    """Hundreds of boxes take longer than the event loop should wait, whatever the model's outputs."""
    threads = in_which_threads(monkeypatch, call_module, "decode_boxes")
    await detect(pipeline, options=options)

    assert [name.startswith("decode") for name in threads] == [True]


async def test_a_model_that_suppresses_boxes_is_not_asked_for_more(fake_triton: Fake, pipeline: Pipeline) -> None:
    """The request is rejected before its image is decoded, and leaves no memory reserved."""
    fake, _ = fake_triton
    fake.config = outputs_config(**FOUR)
    with pytest.raises(InvalidParameter, match=r"^iou: the model itself drops boxes that overlap by more than 0\.7, the maximum$"):
        await detect(pipeline, b"no image", options=OPTIONS._replace(iou=0.71))

    assert not fake.requests
    assert pipeline.admission.memory.own_bytes == 0


async def test_a_raw_head_waits_for_a_thread_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch, fake_triton: Fake, pipeline: Pipeline, gate: Gate
) -> None:
    """The pool may be busy with images by then."""
    fake, _ = fake_triton
    fake.config = outputs_config(head=YOLO_HEAD)
    fake.answer = infer_response(head=YOLO_HEAD)
    await detect(pipeline)
    fake.may_answer.clear()
    asking = asyncio.ensure_future(detect(pipeline, seconds=1.5))
    assert await eventually(lambda: len(fake.requests) == 2)
    gate.block(monkeypatch, pipeline_module, "fill_input")
    blocking = asyncio.ensure_future(detect(pipeline))
    assert await eventually(gate.reached.is_set)
    fake.may_answer.set()

    with pytest.raises(DeadlinePassed, match="took too long"):
        await asking
    gate.opened.set()
    assert len((await blocking).scores) == 0


async def test_an_output_that_does_not_fit_the_config_is_invalid(
    fake_triton: Fake, transport: Transport, pipeline: Pipeline
) -> None:
    """The slot is given back all the same."""
    fake, _ = fake_triton
    fake.answer = infer_response(output0=TABLE[:, :5])
    with pytest.raises(InvalidModelOutput, match="tiny"):
        await detect(pipeline)

    assert free_slots(transport) == SLOTS


async def test_a_broken_image_never_reaches_triton(fake_triton: Fake, transport: Transport, pipeline: Pipeline) -> None:
    """Its slot is given back."""
    fake, _ = fake_triton
    with pytest.raises(InvalidImage):
        await detect(pipeline, SCENE[:500])

    assert not fake.requests
    assert free_slots(transport) == SLOTS


async def test_a_known_model_is_ready_without_a_question(fake_triton: Fake, pipeline: Pipeline) -> None:
    """Its spec is kept, and its slots exist; not even a deadline that has passed is noticed then."""
    fake, _ = fake_triton
    spec = await pipeline.prepare("tiny", Deadline.after(5))

    assert await pipeline.prepare("tiny", Deadline.after(-1)) is spec
    assert fake.config_reads == 1
    assert len(fake.registrations) == 1
    assert pipeline.transport_mode == "shm"


async def test_a_model_is_not_ready_while_its_slots_are_missing(fake_triton: Fake, pipeline: Pipeline) -> None:
    """A spec that is known does not mean that there is memory for its images."""
    await pipeline.spec("tiny")
    fake, _ = fake_triton
    assert not fake.registrations
    await pipeline.prepare("tiny", Deadline.after(5))

    assert len(fake.registrations) == 1


@pytest.mark.parametrize("step", ["read_config", "register"])
async def test_a_triton_that_does_not_answer_in_time_is_a_missed_deadline(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, step: str
) -> None:
    """The deadline counts for reading the config and for registering shared memory."""

    async def hang(*_: object) -> tuple[dict[str, Any], str]:
        await asyncio.sleep(0.5)
        return CONFIG, "1"

    monkeypatch.setattr(TritonClient, step, hang)
    with pytest.raises(DeadlinePassed, match="did not answer in time"):
        await detect(pipeline, seconds=0.1)


@pytest.mark.parametrize(("model", "detail"), [("listed", "./just pull listed"), ("other", "there is no such model")])
async def test_a_model_that_could_be_pulled_says_how(fake_triton: Fake, pipeline: Pipeline, model: str, detail: str) -> None:
    """For any other model the error only says that it does not exist."""
    fake, _ = fake_triton
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"

    with pytest.raises(UnknownModel, match=detail) as caught:
        await detect(pipeline, options=OPTIONS._replace(model=model))
    assert ("restart Triton" in caught.value.detail) is (model == "listed")


async def test_a_request_that_waits_for_a_thread_until_its_deadline_is_dropped(
    monkeypatch: pytest.MonkeyPatch, fake_triton: Fake, transport: Transport, pipeline: Pipeline, gate: Gate
) -> None:
    """It takes neither a slot nor an inference."""
    fake, _ = fake_triton
    gate.block(monkeypatch, pipeline_module, "fill_input")
    blocking = asyncio.ensure_future(detect(pipeline))
    assert await eventually(gate.reached.is_set)
    with pytest.raises(DeadlinePassed):
        await detect(pipeline, seconds=0.1)
    assert free_slots(transport) == SLOTS
    gate.opened.set()
    await blocking

    assert len(fake.requests) == 1


async def test_closing_waits_for_images_and_inferences(
    monkeypatch: pytest.MonkeyPatch, fake_triton: Fake, transport: Transport, gate: Gate
) -> None:
    """`close` waits for decoding threads and RPCs, which use slots, also if their requests do not wait any more."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    with open_admission() as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)
        await detect(pipeline)
        fake.may_answer.clear()
        with pytest.raises(DeadlinePassed):
            await detect(pipeline, seconds=0.5)
        gate.block(monkeypatch, pipeline_module, "fill_input")
        with pytest.raises(DeadlinePassed):
            await detect(pipeline, seconds=0.5)
        assert free_slots(transport) == SLOTS - 1
        asyncio.get_running_loop().call_later(0.2, fake.may_answer.set)
        threading.Timer(0.6, gate.opened.set).start()
        await pipeline.close()

        assert gate.opened.is_set()
        assert fake.may_answer.is_set()
        assert await eventually(lambda: admission.memory.used_bytes == 0)
        assert free_slots(transport) == SLOTS


@pytest.fixture
async def narrow(fake_triton: Fake, transport: Transport) -> AsyncIterator[Pipeline]:
    """A pipeline that has room for one request at a time."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    with open_admission(max_requests=1) as admission:
        made = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)
        yield made
        fake.may_answer.set()
        await made.close()


async def test_a_request_above_the_limit_is_rejected(fake_triton: Fake, narrow: Pipeline) -> None:
    """Neither a thread nor Triton is bothered with it."""
    fake, _ = fake_triton
    fake.may_answer.clear()
    first = asyncio.ensure_future(detect(narrow))
    assert await eventually(lambda: len(fake.requests) == 1)
    with pytest.raises(GatewayFull):
        await detect(narrow, b"not an image")
    fake.may_answer.set()

    assert len((await first).scores) == 2
    assert len((await detect(narrow)).scores) == 2
    assert len(fake.requests) == 2


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_request_counts_until_its_rpc_has_ended(fake_triton: Fake, narrow: Pipeline, how: str) -> None:
    """Triton still works for it, so another one takes its place only then."""
    fake, _ = fake_triton
    fake.may_answer.clear()
    asking = asyncio.ensure_future(detect(narrow, seconds=0.5 if how == "deadline" else 30))
    assert await eventually(lambda: len(fake.requests) == 1)
    if how == "cancel":
        asking.cancel()
    with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
        await asking
    with pytest.raises(GatewayFull):
        await narrow.admission.check("tiny")
    assert narrow.admission.memory.used_bytes > 0
    fake.may_answer.set()

    assert await eventually(lambda: narrow.admission.memory.used_bytes == 0)
    await narrow.admission.check("tiny")


async def test_a_request_that_is_cancelled_in_the_queue_is_never_decoded(
    monkeypatch: pytest.MonkeyPatch, fake_triton: Fake, pipeline: Pipeline, gate: Gate
) -> None:
    """Its memory is free at once, although the thread is busy."""
    fake, _ = fake_triton
    gate.block(monkeypatch, pipeline_module, "fill_input")
    blocking = asyncio.ensure_future(detect(pipeline))
    assert await eventually(gate.reached.is_set)
    before = pipeline.admission.memory.used_bytes
    waiting = asyncio.ensure_future(detect(pipeline))
    assert await eventually(lambda: pipeline.admission.memory.used_bytes > before)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pipeline.admission.memory.used_bytes == before
    gate.opened.set()
    await blocking

    assert len(fake.requests) == 1


async def test_a_model_that_fails_repeatedly_is_not_asked_again(fake_triton: Fake, pipeline: Pipeline) -> None:
    """Not even an image that cannot be decoded is looked at, nor does it use memory; other models go on."""
    fake, _ = fake_triton
    fake.refusal = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
    for _ in range(5):
        with pytest.raises(TritonUnavailable):
            await detect(pipeline)
    assert not pipeline.is_usable("tiny")
    for options in (OPTIONS, OPTIONS._replace(model="tiny")):
        with pytest.raises(CircuitOpen):
            await detect(pipeline, b"not an image", options=options)
    with pytest.raises(CircuitOpen):
        pipeline.check_circuit("tiny")
    assert pipeline.admission.memory.used_bytes == 0
    pipeline.check_circuit("other")
    fake.refusal = None
    assert len((await detect(pipeline, options=OPTIONS._replace(model="other"))).scores) == 2

    assert await eventually(lambda: pipeline.is_usable("tiny"))
    assert len((await detect(pipeline)).scores) == 2


async def test_decoding_needs_memory(fake_triton: Fake, transport: Transport) -> None:
    """An image whose pixels do not fit the memory that is left is rejected before they are decoded; a smaller one is not."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    with open_admission(memory_bytes=2**20) as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)
        with pytest.raises(GatewayFull, match="no memory left for an image of this size"):
            await detect(pipeline, png(1000, 1000, 8, GREY))
        assert admission.memory.used_bytes == 0
        assert free_slots(transport) == SLOTS

        assert len((await detect(pipeline)).scores) == 2
        assert admission.memory.used_bytes == 0
        await pipeline.close()


async def test_a_body_needs_memory_while_triton_does_not_answer(fake_triton: Fake, transport: Transport) -> None:
    """With memory for two bodies, the third request is rejected before anything is known about its model."""
    fake, client = fake_triton
    body = bytes(1000)
    with open_admission(memory_bytes=2 * len(body)) as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)
        fake.may_tell.clear()
        waiting = [asyncio.ensure_future(detect(pipeline, body)) for _ in range(2)]
        assert await eventually(lambda: admission.memory.used_bytes == 2 * len(body))
        with pytest.raises(GatewayFull, match="no memory left"):
            await asyncio.wait_for(detect(pipeline, body), 5)
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        assert admission.memory.used_bytes == 0
        fake.may_tell.set()
        await pipeline.close()


async def test_a_file_that_triton_decodes_needs_no_memory_for_its_pixels(fake_triton: Fake, transport: Transport) -> None:
    """Only the file and the slot count."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    file = {"name": "file", "data_type": "TYPE_STRING", "dims": [1]}
    fake.config = {**CONFIG, "input": [file], "parameters": {"square": {"string_value": "32"}}}
    with open_admission(memory_bytes=2**21) as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)

        assert (await detect(pipeline, png(1000, 1000, 8, GREY))).width == 1000
        await pipeline.close()


async def test_a_large_image_that_would_be_decoded_too_late_is_rejected_at_once(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, gate: Gate
) -> None:
    """The images before it are known by their pixels; a small image and one with more time are accepted."""
    large = png(3000, 3000, 8, GREY)
    gate.block(monkeypatch, pipeline_module, "fill_input")
    running = [asyncio.ensure_future(detect(pipeline, large))]
    assert await eventually(gate.reached.is_set)
    with pytest.raises(GatewayFull, match="decoding the image, and those before it"):
        await asyncio.wait_for(detect(pipeline, large, seconds=0.2), 5)
    running += [asyncio.ensure_future(detect(pipeline, data)) for data in (large, SCENE)]
    assert await eventually(lambda: pipeline.admission.decode_backlog.pixels == 2 * 9_000_000)
    gate.opened.set()
    outcomes = await asyncio.gather(*running, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [InvalidImage, InvalidImage, Detections]
    assert pipeline.admission.decode_backlog.pixels == 0


async def test_a_share_is_that_of_the_call(fake_triton: Fake, pipeline: Pipeline) -> None:
    """A key that has used up its share is rejected, another request is not."""
    fake, _ = fake_triton
    fake.may_answer.clear()
    call = CallContext(Deadline.after(30), Timing(), "abc", Share("camera", 0.01))
    first = asyncio.ensure_future(pipeline.run(SCENE, OPTIONS, call))
    assert await eventually(lambda: len(fake.requests) == 1)
    with pytest.raises(GatewayFull):
        await pipeline.run(SCENE, OPTIONS, call)
    fake.may_answer.set()

    assert len((await detect(pipeline)).scores) == 2
    await first


async def test_the_caller_may_choose_the_time_of_a_request(pipeline: Pipeline) -> None:
    """Up to the maximum."""
    assert pipeline.limits.timeout(None) == 10
    assert pipeline.limits.timeout(1500) == 1.5
    assert pipeline.limits.timeout(30_000) == 30
    with pytest.raises(InvalidParameter, match=r"^timeout_ms: the maximum is 30000$"):
        pipeline.limits.timeout(30_001)


async def test_a_long_default_time_is_not_limited_by_the_maximum(fake_triton: Fake, transport: Transport) -> None:
    """The maximum is for callers."""
    with open_admission() as admission:
        pipeline = Pipeline(
            pool_of(fake_triton[1], transport),
            admission,
            METRICS,
            "tiny",
            frozenset(),
            LIMITS._replace(timeout_seconds=60),
            AGGREGATION,
        )

        assert pipeline.limits.timeout(None) == 60
        await pipeline.close()


async def test_warming_up_measures_the_model(fake_triton: Fake, transport: Transport) -> None:
    """One inference with the default model; afterwards the limit is that of its speed."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=TABLE)
    with open_admission(max_requests=1000) as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "tiny", frozenset(), LIMITS, AGGREGATION)
        await pipeline.warm_up()
        fake.may_answer.clear()
        asking = [asyncio.ensure_future(detect(pipeline)) for _ in range(20)]
        assert await eventually(lambda: len(fake.requests) == 21)
        fake.may_answer.set()
        await asyncio.gather(*asking)
        await pipeline.close()

    assert [request.id for request in fake.requests[:2]] == ["warm-up", "abc"]


async def test_a_model_that_cannot_be_warmed_up_is_an_error(fake_triton: Fake, pipeline: Pipeline) -> None:
    """The caller decides whether that matters."""
    fake, _ = fake_triton
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    with pytest.raises(TritonUnavailable):
        await pipeline.warm_up()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_slot_is_free_only_when_its_thread_has_ended(
    settings: Settings, triton: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch, gate: Gate, how: str
) -> None:
    """A decoder cannot be stopped, so another image does not get the slot it writes to. With a real Triton."""
    assert triton.poll() is None
    client = TritonClient(settings.triton_url, settings.control_key_path)
    transport = Transport("auto")
    with open_admission() as admission:
        pipeline = Pipeline(pool_of(client, transport), admission, METRICS, "six_columns", frozenset(), LIMITS, AGGREGATION)
        spec = await pipeline.prepare("six_columns", Deadline.after(30))
        assert free_slots(transport, spec.image_bytes) == SLOTS
        gate.block(monkeypatch, canvas, "decode")
        asking = asyncio.ensure_future(detect(pipeline, seconds=0.5 if how == "deadline" else 30))
        assert await eventually(gate.reached.is_set)
        assert free_slots(transport, spec.image_bytes) == SLOTS - 1
        if how == "cancel":
            asking.cancel()
        with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
            await asking
        assert free_slots(transport, spec.image_bytes) == SLOTS - 1
        gate.opened.set()

        assert await eventually(lambda: free_slots(transport, spec.image_bytes) == SLOTS)
        await pipeline.close()
        await transport.close()
        await client.close()


@pytest.mark.usefixtures("triton")
async def test_broken_images_leave_slots_to_others(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are slots, and shared memory is still available. With a real Triton."""
    monkeypatch.setattr(arena_size, "SLOTS", 2)
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        for _ in range(5):
            json(await client.post("/predict/six_columns", content=SCENE[:500]), 422)

        assert await finds(client)
