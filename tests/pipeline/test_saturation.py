"""Gauges of a worker, from what it has in use."""

import asyncio
from contextlib import ExitStack

import pytest

from app.pipeline.decode_pool import DecodePool
from app.pipeline.saturation import sample
from app.resilience.admission import Share
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.deadline import Deadline
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.server import TritonServer
from app.triton.transport import Transport
from tests.support import open_admission


async def noop() -> None:
    """Probe nothing."""


@pytest.fixture
def metrics(table: WorkerTable) -> Metrics:
    return Metrics(table, "0")


def shown(metrics: Metrics, name: str, label: str = "triton") -> dict[str, float]:
    """Return the numbers of a metric, by a label."""
    (family,) = (family for family in metrics.collect() if family.name == name)
    return {sample.labels[label]: sample.value for sample in family.samples}


async def test_a_triton_that_has_gone_is_neither_left_out_nor_called(metrics: Metrics) -> None:
    """Its gauges do not stay as they were, those of the others do."""
    gone, stays = (TritonServer(TritonClient(f"192.0.2.{number}:8001")) for number in (1, 2))
    pool = TritonPool(Transport("inline"), [gone, stays])
    for server in (gone, stays):
        served = server.model("tiny")
        served.calls = 1
        served.circuit = CircuitBreaker("tiny", noop)
        served.circuit.state = "open"
    decode_pool = DecodePool(1)
    with open_admission() as admission:
        sample(metrics, admission, pool, decode_pool, {})
        for name in ("api_triton_left_out", "api_triton_calls"):
            assert shown(metrics, name) == {gone.address: 1, stays.address: 1}
        pool.remove(gone)
        await pool.refresh()
        sample(metrics, admission, pool, decode_pool, {})

    for name in ("api_triton_left_out", "api_triton_calls"):
        assert shown(metrics, name) == {gone.address: 0, stays.address: 1}
    decode_pool.close()
    await pool.close()


async def test_images_of_batches_and_their_memory_are_shown(metrics: Metrics) -> None:
    """Those that wait for their turn, whatever their API key; the memory is a part of that for images."""
    pool = TritonPool(Transport("inline"), [])
    decode_pool = DecodePool(1)
    with open_admission(memory_bytes=1000) as admission, ExitStack() as admitted:
        shares = (Share("a", 0.5), Share("b", 0.5))
        lines = [admission.batch_line("tiny", 1, share) for share in shares]
        for line in lines:
            while not line.waiting:
                admitting = asyncio.ensure_future(line.admit(Deadline.after(60)))
                await asyncio.sleep(0)
                if admitting.done():
                    admitted.enter_context(admitting.result())
                else:
                    admitted.callback(admitting.cancel)
        reservation = admission.reserve_for_batch("images")
        reservation.add(100)
        sample(metrics, admission, pool, decode_pool, {})
        assert shown(metrics, "api_model_waiting_batch_images", "model") == {"tiny": 2}
        assert shown(metrics, "api_reserved_bytes", "purpose") == {"uploads": 0, "images": 100, "batches": 100}
        limits = shown(metrics, "api_reserved_bytes_limit", "purpose")
        assert (limits["images"], limits["batches"]) == (1000, 500)
        reservation.release()
    decode_pool.close()
    await pool.close()
