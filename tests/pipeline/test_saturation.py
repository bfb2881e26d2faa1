"""Gauges of a worker, from what it has in use."""

import pytest

from app.pipeline.decode_pool import DecodePool
from app.pipeline.saturation import sample
from app.resilience.circuit_breaker import CircuitBreaker
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


def shown(metrics: Metrics, name: str) -> dict[str, float]:
    """Return the numbers of a metric, by Triton."""
    (family,) = (family for family in metrics.collect() if family.name == name)
    return {sample.labels["triton"]: sample.value for sample in family.samples}


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
