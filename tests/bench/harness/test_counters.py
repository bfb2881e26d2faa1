"""Triton's own counters."""

import asyncio

import grpc
import pytest

from app.triton.client import TritonClient
from bench.harness.counters import Counters, CountersError, read_counters
from bench.report.measurements import TritonUse
from tests.fakes.triton import FakeTriton

ZERO = Counters(inferences=0, executions=0, successes=0, compute_ns=0, waits=0, queue_ns=0, batches={})


def test_only_what_happened_in_the_meantime_counts() -> None:
    before = Counters(
        inferences=10, executions=4, successes=10, compute_ns=5_000_000, waits=10, queue_ns=9_000_000, batches={"1": 2, "4": 2}
    )
    after = Counters(
        inferences=18, executions=6, successes=18, compute_ns=21_000_000, waits=18, queue_ns=13_000_000, batches={"1": 2, "4": 4}
    )

    assert after.since(before) == TritonUse(inferences=8, executions=2, queue_ms=0.5, compute_ms=2.0, batches={"4": 2})
    assert after.since(before).mean_batch == 4


def test_a_model_that_did_nothing_divides_nothing_by_zero() -> None:
    assert ZERO.since(ZERO) == TritonUse(inferences=0, executions=0, queue_ms=0.0, compute_ms=0.0, batches={})


async def test_versions_of_a_model_are_added_up(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    fake, _ = fake_triton
    for _ in range(2):
        stats = fake.statistics.model_stats.add(name="m", inference_count=3)
        stats.inference_stats.queue.count, stats.inference_stats.queue.ns = 3, 6
        batch = stats.batch_stats.add(batch_size=2)
        batch.compute_infer.count = 1

    expected = ZERO._replace(inferences=6, waits=6, queue_ns=12, batches={"2": 2})
    assert await asyncio.to_thread(read_counters, fake.url, "m") == expected


async def test_a_refusal_is_one_line(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    fake, _ = fake_triton
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "unknown model\nsomewhere"
    with pytest.raises(CountersError, match=f"^Triton at {fake.url}: NOT_FOUND unknown model$"):
        await asyncio.to_thread(read_counters, fake.url, "m")
