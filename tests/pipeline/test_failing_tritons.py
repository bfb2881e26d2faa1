"""Tritons that fail, hang or fall silent: what opens the circuit of a model, what a probe asks, and what another Triton does."""

import asyncio
import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import DeadlinePassed, GatewayError, TritonUnavailable
from app.pipeline.probe import run_probe
from app.triton.client import TritonClient
from app.triton.silence import Silence
from app.triton.status import Draining
from tests.fakes.triton import CONFIG, GONE, SPEC, FakeTriton, Refusal, infer_response
from tests.model.configs import FILE, spec_of
from tests.pipeline.conftest import BROKEN, FAILED, FULL, LATE, MISSHAPEN, SICK, STOPPING, is_closed
from tests.support import eventually
from tests.world import HANG_SECONDS, World

pytestmark = pytest.mark.world(mode="inline")


@pytest.mark.parametrize(
    ("how", "opens"),
    [
        ("missed deadlines", True),
        ("callers leave", True),
        ("fills the limit", True),
        ("other image answered", False),
        ("answered late", False),
    ],
)
async def test_inferences_that_hang_open_the_circuit_unless_triton_answers_others(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str, *, opens: bool
) -> None:
    monkeypatch.setattr(Silence, "ask", lambda *_: None)  # however late a busy machine lets Triton answer
    images = 5
    if how == "fills the limit":  # no more requests would be admitted
        await world.infer()
        world.queue.limit, images = 2.0, 2
    world.hold()
    world.fake.held = {"hang", "probe"}
    if how == "callers leave":
        await world.leave(await world.start(images, request_id="hang"))
    else:
        await world.give_up(images, request_id="hang")
    assert is_closed(world)
    if how == "answered late":
        await world.settle()
    elif how == "other image answered":
        await world.infer()
    await world.time.skip(HANG_SECONDS)
    assert is_closed(world) is not opens
    assert world.fake.cancelled == 0
    world.let_answer()

    await eventually(lambda: is_closed(world))


@pytest.mark.parametrize("version", [pytest.param("2.51.0", marks=pytest.mark.world(mode="auto")), "2.59.1"])
async def test_deadlines_missed_while_triton_answers_nothing_open_the_circuit(world: World, version: str) -> None:
    await world.set_version(version)
    await world.infer()
    with await world.admit():
        limit = world.queue.limit
    world.hold()
    world.fake.may_tell.clear()
    asked = world.fake.server_reads
    asking = await world.start(4, 20)
    await world.time.skip(1)
    await eventually(lambda: world.fake.server_reads > asked)
    assert not world.pool.is_silent("tiny")
    await world.time.skip(20)
    await asyncio.gather(*asking, return_exceptions=True)
    assert is_closed(world)
    assert world.pool.is_silent("tiny")
    await world.give_up(1, 1)
    assert not is_closed(world)
    world.let_answer()

    await eventually(lambda: is_closed(world) and not world.server.silence.missed)
    await world.settle()
    assert world.queue.limit == limit  # what waited for Triton is no measure of its speed
    await world.infer()


Fake = tuple[FakeTriton, TritonClient]


async def test_model_of_files_gets_a_file(fake_triton: Fake) -> None:
    fake, client = fake_triton
    await run_probe(client, spec_of(image=FILE, batch=0, square="32"))

    (request,) = fake.requests
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1])
    (content,) = request.raw_input_contents
    assert struct.unpack("<I", content[:4]) == (len(content) - 4,)
    with Image.open(BytesIO(content[4:])) as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1, 1))


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (FAILED, False),
        (MISSHAPEN, True),  # requests should get the same error instead of `CircuitOpen`
        (GONE, True),
        (None, True),  # an answer without sense
        (STOPPING, Draining),
        (LATE, DeadlinePassed),
        (SICK, TritonUnavailable),
    ],
)
async def test_probe_shows_whether_triton_can_run_the_model(
    fake_triton: Fake,
    refusal: Refusal | None,
    expected: bool | type[GatewayError],  # noqa: FBT001
) -> None:
    fake, client = fake_triton
    fake.refusal = refusal
    fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    fake.answer.raw_output_contents[0] = b""
    if isinstance(expected, bool):
        assert await run_probe(client, SPEC) is expected
    else:
        with pytest.raises(expected):
            await run_probe(client, SPEC)

    assert len(fake.requests) == 1


CONFIG_OF_BATCHES = {**CONFIG, "max_batch_size": 4}


class AnsweringTriton(FakeTriton):
    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG_OF_BATCHES

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.answer = infer_response(output0=np.zeros((request.inputs[0].shape[0], 2, 6), np.float32))
        return await super().ModelInfer(request, context)

    @property
    def batches(self) -> list[int]:
        return [request.inputs[0].shape[0] for request in self.requests if request.id != "probe"]

    @property
    def images(self) -> int:
        return sum(self.batches)


TWO = pytest.mark.world(AnsweringTriton, AnsweringTriton, max_calls=1)


@TWO
@pytest.mark.parametrize("refusal", [FULL, FAILED, GONE])
async def test_call_that_one_triton_refuses_goes_to_the_other(world: World, refusal: Refusal) -> None:
    """A retry at another Triton needs no budget."""
    await world.until_known()
    world.max_calls = 100
    world.fake.refusal = world.fake.model_refusal = refusal

    assert await world.errors(30) == []
    assert world.fakes[1].images == 30


@TWO
async def test_triton_whose_model_fails_is_left_out_while_another_runs_it(world: World) -> None:
    await world.until_known()
    world.fake.refusal = FAILED
    while world.usable != [False, True]:
        world.server.model("tiny").forget_speed()  # otherwise it is hardly ever chosen again
        assert await world.errors(1) == []
        await world.until_known()
    failed = world.fake.images
    assert failed >= 5
    asked = len(world.fake.requests)
    for probes in (1, 2):
        await world.time.skip(1)
        await eventually(lambda probes=probes: len(world.fake.requests) >= asked + probes)  # type: ignore[misc]
    assert await world.errors(10) == []
    assert (world.fake.images, world.usable) == (failed, [False, True])
    world.fakes[1].refusal = FAILED  # then it cannot process the blank image, and Triton is not the cause

    await eventually(lambda: world.usable == [True, True])


@TWO
async def test_batches_are_as_large_as_the_triton_takes(world: World) -> None:
    await world.until_known()
    near, far = world.fakes
    far.config = {**CONFIG_OF_BATCHES, "max_batch_size": 2}
    world.pool.servers[1].specs.forget("tiny")
    await world.until_known()
    world.hold()
    asking = asyncio.ensure_future(world.errors(12))
    await eventually(lambda: world.running == [1, 1])
    near.next_refusals = [None, BROKEN]  # its batch of four cannot go to the other one
    near.may_answer.set()
    await eventually(lambda: len(near.requests) >= 3)
    far.may_answer.set()

    assert await asking == []
    assert near.batches[:3] == [1, 4, 4]
    assert await world.errors(30) == []
    assert [max(fake.batches) for fake in world.fakes] == [4, 2]
