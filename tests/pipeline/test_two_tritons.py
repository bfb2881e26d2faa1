"""Calls to two Tritons, one of which fails, hangs, is restarted or runs on another host, and gauges of those that have gone."""

import asyncio

import numpy as np
import pytest

from app.errors import DeadlinePassed, InferenceFailed
from app.pipeline.saturation import sample
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.model_queue import ModelQueue
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.status import Overloaded
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.pipeline import refusals
from tests.pipeline.refusals import Refusal
from tests.support import TABLE, eventually
from tests.world import HANG_SECONDS, IMAGE, World

CONFIG_OF_BATCHES = {**CONFIG, "max_batch_size": 4}


class AnsweringTriton(FakeTriton):
    """Answers batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG_OF_BATCHES

    async def ModelInfer(self, request: object, context: object) -> object:  # noqa: N802
        images = request.inputs[0].shape[0]  # type: ignore[attr-defined]
        self.answer = infer_response(output0=np.zeros((images, 2, 6), np.float32))
        return await super().ModelInfer(request, context)

    @property
    def batches(self) -> list[int]:
        """The number of images in each call, without those of probes."""
        return [request.inputs[0].shape[0] for request in self.requests if request.id != "probe"]

    @property
    def images(self) -> int:
        """The number of images in all calls, without those of probes."""
        return sum(self.batches)


pytestmark = pytest.mark.world(AnsweringTriton, AnsweringTriton, mode="inline", max_calls=1)
SHARED = pytest.mark.world(mode="auto")


@pytest.fixture
async def world(world: World) -> World:
    """A world whose worker knows both Tritons."""
    await world.until_known()
    return world


async def until_busy(world: World) -> None:
    """Send images until the first Triton has had one."""
    while not world.fake.batches:
        await world.infer()


@pytest.mark.parametrize("refusal", [refusals.FULL, refusals.FAILED, refusals.GONE])
async def test_call_that_one_triton_refuses_goes_to_the_other(world: World, refusal: Refusal) -> None:
    """A retry at another Triton needs no budget."""
    world.max_calls = 100
    world.fake.refusal = world.fake.model_refusal = refusal

    assert await world.errors(30) == []
    assert world.fakes[1].images == 30


@pytest.mark.parametrize("refusal", [refusals.STOPPING, refusals.BROKEN])
async def test_triton_that_loses_a_call_is_left_out_at_once(world: World, refusal: Refusal) -> None:
    world.fake.refusal = refusal
    await until_busy(world)
    assert world.usable == [False, True]
    lost = world.fake.images
    assert await world.errors(10) == []
    assert world.fake.images == lost
    world.fake.refusal = None

    await eventually(lambda: world.usable == [True, True])
    assert world.pool.servers[0].model("tiny").speed == 0
    await asyncio.gather(*(world.infer() for _ in range(20)))
    assert world.fake.images > lost


async def test_overloaded_triton_stays_in_use(world: World) -> None:
    for fake in world.fakes:
        fake.refusal = refusals.FULL
    with pytest.raises(Overloaded):
        await world.infer()

    assert [fake.images for fake in world.fakes] == [1, 1]
    assert world.usable == [True, True]


async def test_image_that_fails_everywhere_is_no_fault_of_a_triton(world: World) -> None:
    for fake in world.fakes:
        fake.refusal = refusals.FAILED
    for _ in range(10):
        with pytest.raises(InferenceFailed):
            await world.infer()

    assert world.usable == [True, True]


async def test_triton_whose_model_fails_is_left_out_while_another_runs_it(world: World) -> None:
    world.fake.refusal = refusals.FAILED
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
    world.fakes[1].refusal = refusals.FAILED  # then it cannot process the blank image, and Triton is not the cause

    await eventually(lambda: world.usable == [True, True])


async def test_hung_triton_is_left_out_while_the_other_answers(world: World) -> None:
    assert await world.errors(8) == []
    world.fake.may_answer.clear()
    asking = [asyncio.ensure_future(world.infer(100)) for _ in range(2)]
    await eventually(lambda: world.running == [1, 0])
    await world.time.skip(HANG_SECONDS / 2)
    assert await world.errors(1) == []
    assert world.usable == [False, True]
    assert await world.errors(30) == []
    await world.time.skip(100)
    missed = [one for one in await asyncio.gather(*asking, return_exceptions=True) if isinstance(one, BaseException)]
    assert [type(error) for error in missed] == [DeadlinePassed]
    assert world.fake.cancelled == 0
    world.let_answer()

    await eventually(lambda: world.usable == [True, True])
    before = world.fake.images
    assert await world.errors(30) == []
    assert world.fake.images > before


@SHARED
async def test_memory_is_mapped_by_one_triton_while_the_other_gets_messages(world: World) -> None:
    world.fakes[1].accepts_regions = False
    assert await world.errors(30) == []

    near, far = world.fakes
    assert near.images
    assert far.images
    assert all("shared_memory_region" in request.inputs[0].parameters for request in near.requests)
    assert {request.raw_input_contents[0] for request in far.requests} <= {IMAGE.tobytes() * images for images in range(1, 5)}


@SHARED
@pytest.mark.parametrize(("refusal", "is_usable"), [(None, True), (refusals.REFUSED, False)])
async def test_restarted_triton_registers_again_or_costs_no_caller_an_answer(
    world: World, refusal: Refusal | None, *, is_usable: bool
) -> None:
    """If it has been stopped, the other Triton gets the images."""
    assert await world.errors(20) == []
    world.fake.regions.clear()
    world.fake.refusal = refusal
    world.fake.next_refusals += [None] * 100 * is_usable

    assert await world.errors(20) == []
    assert world.usable == [is_usable, True]
    assert [len(fake.registrations) for fake in world.fakes] == [2, 1]


async def test_batches_are_as_large_as_the_triton_takes(world: World) -> None:
    near, far = world.fakes
    far.config = {**CONFIG_OF_BATCHES, "max_batch_size": 2}
    world.pool.servers[1].specs.forget("tiny")
    await world.until_known()
    world.hold()
    asking = asyncio.ensure_future(world.errors(12))
    await eventually(lambda: world.running == [1, 1])
    near.next_refusals = [None, refusals.BROKEN]  # its batch of four cannot go to the other one
    near.may_answer.set()
    await eventually(lambda: len(near.requests) >= 3)
    far.may_answer.set()

    assert await asking == []
    assert near.batches[:3] == [1, 4, 4]
    assert await world.errors(30) == []
    assert [max(fake.batches) for fake in world.fakes] == [4, 2]


class Gauges:
    def __init__(self, world: World, table: WorkerTable) -> None:
        self._world, self._metrics = world, Metrics(table, "0")

    def sample(self) -> None:
        sample(self._metrics, self._world.admission, self._world.pool, self._world.pipeline.threads, {})

    def read(self, name: str, label: str = "triton") -> dict[str, float]:
        """Return the values of a metric by one of its labels."""
        (family,) = (family for family in self._metrics.collect() if family.name == name)
        return {sample.labels[label]: sample.value for sample in family.samples}


@pytest.fixture
def gauges(world: World, table: WorkerTable) -> Gauges:
    return Gauges(world, table)


async def noop() -> None: ...


async def test_triton_that_has_gone_is_neither_left_out_nor_called(gauges: Gauges, world: World) -> None:
    gone, stays = world.pool.servers
    for server in (gone, stays):
        served = server.model("tiny")
        served.calls = 1
        served.circuit = CircuitBreaker(TABLE, "tiny", server.address, noop)
        served.circuit.is_open = served.circuit.is_wrong = True
    for shown in (1, 0):
        gauges.sample()
        for name in ("api_triton_left_out", "api_triton_calls", "api_triton_wrong"):
            assert gauges.read(name) == {gone.address: shown, stays.address: 1}
        if shown:
            world.pool.remove(gone)
            await world.pool.refresh()


async def test_tritons_that_come_and_go_leave_room_for_admission(gauges: Gauges, world: World, table: WorkerTable) -> None:
    stays, _ = world.pool.servers
    for pod in range(150):
        server = TritonBackend(TritonClient(f"192.0.2.{pod}:8001"), table)
        server.new_images = 100
        for model in range(150):
            server.model(f"model-{model}")
        world.pool.add(server)
        gauges.sample()
        world.pool.remove(server)
        await world.pool.refresh()
        gauges.sample()
        await world.time.skip(601)
    queue = ModelQueue(table, "new", 10, 1.0)
    permits = [await queue.admit(ANYBODY, Deadline.after(60)) for _ in range(10)]
    stays.new_images = 3
    gauges.sample()

    assert queue.in_progress == 10
    assert len(gauges.read("api_triton_images")) < 5
    assert gauges.read("api_triton_images")[stays.address] == 3
    for permit in permits:
        permit.release()
