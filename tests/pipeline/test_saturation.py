"""Gauges of a worker."""

import asyncio
from contextlib import ExitStack

import pytest

from app.pipeline.saturation import sample
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.model_queue import ModelQueue
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from tests.fakes.triton import FakeTriton
from tests.support import TABLE
from tests.world import World


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


@pytest.mark.world(FakeTriton, FakeTriton)
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


@pytest.mark.world(memory_bytes=1000)
async def test_images_of_batches_and_their_memory_are_shown(gauges: Gauges, world: World) -> None:
    admission = world.admission
    with ExitStack() as admitted:
        for name in ("a", "b"):
            line = admission.batch_queue("tiny", 1, Caller(name))
            while not line.waiting:
                admitting = asyncio.ensure_future(line.admit(Deadline.after(60)))
                await asyncio.sleep(0)
                if admitting.done():
                    admitted.enter_context(admitting.result())
                else:
                    admitted.callback(admitting.cancel)
        reservation = admission.reserve_for_batch(ANYBODY, "images")
        reservation.add(100)
        gauges.sample()
        assert gauges.read("api_model_waiting_batch_images", "model") == {"tiny": 2}
        assert gauges.read("api_reserved_bytes", "purpose") == {"uploads": 0, "anonymous": 0, "images": 100, "batches": 100}
        limits = gauges.read("api_reserved_bytes_limit", "purpose")
        assert (limits["images"], limits["batches"]) == (1000, 500)
        reservation.release()


async def test_tritons_that_come_and_go_leave_room_for_admission(gauges: Gauges, world: World, table: WorkerTable) -> None:
    (stays,) = world.pool.servers
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
