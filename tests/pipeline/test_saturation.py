"""Gauges of a worker."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from app.pipeline.decode_threads import DecodeThreads
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
from tests.world import Time, World


async def noop() -> None: ...


@pytest.fixture
def metrics(table: WorkerTable) -> Metrics:
    return Metrics(table, "0")


@pytest.fixture
def decode_threads() -> Iterator[DecodeThreads]:
    made = DecodeThreads(1)
    yield made
    made.close()


def shown(metrics: Metrics, name: str, label: str = "triton") -> dict[str, float]:
    """Return the values of a metric by one of its labels."""
    (family,) = (family for family in metrics.collect() if family.name == name)
    return {sample.labels[label]: sample.value for sample in family.samples}


@pytest.mark.world(FakeTriton, FakeTriton)
async def test_a_triton_that_has_gone_is_neither_left_out_nor_called(
    metrics: Metrics, world: World, decode_threads: DecodeThreads
) -> None:
    gone, stays = world.pool.servers
    for server in (gone, stays):
        served = server.model("tiny")
        served.calls = 1
        served.circuit = CircuitBreaker(TABLE, "tiny", server.address, noop)
        served.circuit.is_open = served.circuit.is_wrong = True
    sample(metrics, world.admission, world.pool, decode_threads, {})
    for name in ("api_triton_left_out", "api_triton_calls", "api_triton_wrong"):
        assert shown(metrics, name) == {gone.address: 1, stays.address: 1}
    world.pool.remove(gone)
    await world.pool.refresh()
    sample(metrics, world.admission, world.pool, decode_threads, {})

    for name in ("api_triton_left_out", "api_triton_calls", "api_triton_wrong"):
        assert shown(metrics, name) == {gone.address: 0, stays.address: 1}


@pytest.mark.world(memory_bytes=1000)
async def test_images_of_batches_and_their_memory_are_shown(metrics: Metrics, world: World, decode_threads: DecodeThreads) -> None:
    admission = world.admission
    with ExitStack() as admitted:
        lines = [admission.batch_queue("tiny", 1, Caller(name)) for name in ("a", "b")]
        for line in lines:
            while not line.waiting:
                admitting = asyncio.ensure_future(line.admit(Deadline.after(60)))
                await asyncio.sleep(0)
                if admitting.done():
                    admitted.enter_context(admitting.result())
                else:
                    admitted.callback(admitting.cancel)
        reservation = admission.reserve_for_batch(ANYBODY, "images")
        reservation.add(100)
        sample(metrics, admission, world.pool, decode_threads, {})
        assert shown(metrics, "api_model_waiting_batch_images", "model") == {"tiny": 2}
        assert shown(metrics, "api_reserved_bytes", "purpose") == {"uploads": 0, "anonymous": 0, "images": 100, "batches": 100}
        limits = shown(metrics, "api_reserved_bytes_limit", "purpose")
        assert (limits["images"], limits["batches"]) == (1000, 500)
        reservation.release()


async def test_tritons_that_come_and_go_leave_room_for_admission(
    table: WorkerTable, metrics: Metrics, world: World, decode_threads: DecodeThreads, time: Time
) -> None:
    (stays,) = world.pool.servers
    for pod in range(150):
        server = TritonBackend(TritonClient(f"192.0.2.{pod}:8001"), table)
        server.new_images = 100
        for model in range(150):
            server.model(f"model-{model}")
        world.pool.add(server)
        sample(metrics, world.admission, world.pool, decode_threads, {})
        world.pool.remove(server)
        await world.pool.refresh()
        sample(metrics, world.admission, world.pool, decode_threads, {})
        await time.skip(601)
    queue = ModelQueue(table, "new", 10, 1.0)
    permits = [await queue.admit(ANYBODY, Deadline.after(60)) for _ in range(10)]
    stays.new_images = 3
    sample(metrics, world.admission, world.pool, decode_threads, {})

    assert queue.in_progress == 10
    assert len(shown(metrics, "api_triton_images")) < 5
    assert shown(metrics, "api_triton_images")[stays.address] == 3
    for permit in permits:
        permit.release()
