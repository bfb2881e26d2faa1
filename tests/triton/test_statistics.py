"""Statistics of the Tritons: their counters, and means of 30 s, the same whichever worker is asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.embedded.server import EmbeddedTriton
from app.model.spec import from_triton_config
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.triton import metrics
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.statistics import read_statistics
from app.triton.transport import Transport
from tests.fakes.triton import FakeTriton, serving
from tests.support import OpenTable, eventually
from tests.world import Time, time_of_app


def add_version(fake: FakeTriton, name: str, version: str, *counters: int) -> None:
    """Set the counters that a fake returns for a version, in the order of `ModelStatistics`."""
    added = fake.statistics.model_stats.add(name=name, version=version, inference_count=counters[0], execution_count=counters[1])
    added.inference_stats.queue.MergeFrom(messages.StatisticDuration(count=counters[2], ns=counters[3]))
    added.inference_stats.compute_infer.MergeFrom(messages.StatisticDuration(count=counters[4], ns=counters[5]))


async def test_real_triton_counts_images_and_batches(settings: Settings, triton: EmbeddedTriton) -> None:
    assert triton.poll() is None
    client = TritonClient(settings.triton_address)
    spec = from_triton_config(*await client.read_config("six_columns"))
    before = await read_statistics(client, 5)
    for images in (3, 1, 1):
        await client.infer(spec, list(np.zeros((images, *spec.image_shape), np.float32)), timeout_seconds=30)
    after = await read_statistics(client, 5)
    while after["six_columns", "1"].inferences < before["six_columns", "1"].inferences + 5:  # Triton counts after it has answered
        after = await read_statistics(client, 5)
    await client.close()
    done = after["six_columns", "1"].since(before["six_columns", "1"])

    assert (done.inferences, done.executions, done.queue_count, done.compute_infer_count) == (5, 3, 3, 3)
    assert done.batch_size == pytest.approx(5 / 3)
    assert min(done.queue_ns, done.compute_infer_ns) > 0
    assert after["yolo_head", "1"] == before["yolo_head", "1"]


SECONDS = 1000
"""Of an interval, so that none begins by the real time that a busy machine takes."""
IDLE = pytest.approx(float("nan"), nan_ok=True)


def tell(fake: FakeTriton, *counters: int) -> None:
    """Set the counters that a fake returns for its model, in the order of `ModelStatistics`."""
    del fake.statistics.model_stats[:]
    add_version(fake, "tiny", "1", *counters)
    add_version(fake, "not in use", "1", 1, 1, 1, 1, 1, 1)


class Host:
    """Workers of a host, which read two Tritons."""

    def __init__(self, time: Time) -> None:
        self.fakes = [FakeTriton(), FakeTriton()]
        self.tables: list[WorkerTable] = []
        self.workers: list[AsyncExitStack] = []
        """Each ends with its stack."""
        self._time = time

    def start_worker(self) -> None:
        worker = AsyncExitStack()
        self.workers.append(worker)
        self.tables.append(table := WorkerTable())
        worker.callback(table.close)
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(fake.url), table) for fake in self.fakes])
        worker.push_async_callback(pool.close)
        counted = Metrics(table, "0")
        counted.model_active.set(1, "tiny:1")
        worker.callback(asyncio.create_task(metrics.read_regularly(pool, table, counted)).cancel)

    async def pass_intervals(self, intervals: int = 1) -> None:
        """Let time pass until the next reading that has not begun yet."""
        for _ in range(intervals):
            number = int(self._time() // SECONDS) + 1
            await self._time.skip(SECONDS)
            published = self.tables[-1].published
            await eventually(lambda: msgspec.msgpack.decode(published(), type=list[metrics.Reading])[-1].number >= number)  # noqa: B023

    def read(self, worker: int = -1) -> dict[str, float]:
        """Return what a worker exports, by the metrics' names, models and numbers of the Tritons."""
        numbers = {fake.url: str(number) for number, fake in enumerate(self.fakes)}
        return {
            ",".join((sample.name, *(numbers.get(value, value) for value in sample.labels.values()))): sample.value
            for family in metrics.triton_metrics(self.tables[worker])
            for sample in family.samples
        }

    def means(self) -> list[float]:
        return [self.read()[f"triton_{name},tiny"] for name in ("batch_size", "queue_time_ms", "inference_time_ms")]


@pytest.fixture
async def host(open_table: OpenTable, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:  # noqa: ARG001 - makes the table
    """Two workers, after the first reading of their Tritons: 2 images in a batch, and 100 images in 10 batches."""
    monkeypatch.setattr(metrics, "_SECONDS", 60.0)  # real time, on a busy machine
    monkeypatch.setattr(metrics, "_INTERVAL_SECONDS", SECONDS)
    async with AsyncExitStack() as stack:
        time = stack.enter_context(time_of_app())
        await time.skip(SECONDS - time() % SECONDS)
        host = Host(time)
        tell(host.fakes[0], 2, 1, 1, 1_000_000, 1, 5_000_000)
        tell(host.fakes[1], 100, 10, 10, 10_000_000, 10, 50_000_000)
        for fake in host.fakes:
            await stack.enter_async_context(serving(fake))
        for _ in range(2):
            host.start_worker()
            stack.push_async_callback(host.workers[-1].aclose)
        await eventually(lambda: bool(host.tables[0].published()))
        yield host


async def test_means_cover_30_seconds_whichever_worker_has_read(host: Host) -> None:
    assert host.read(0) == host.read(1)
    tell(host.fakes[0], 10, 3, 3, 5_000_000, 3, 15_000_000)
    tell(host.fakes[1], 108, 12, 12, 20_000_000, 12, 80_000_000)
    await host.pass_intervals()
    assert host.means() == [4, 3.5, 10]
    await host.workers[0].aclose()
    host.tables[1].refresh()
    await host.pass_intervals(5)
    assert host.means() == [4, 3.5, 10]
    await host.pass_intervals()
    assert host.means()[0] == IDLE
    tell(host.fakes[0], 18, 5, 3, 5_000_000, 3, 15_000_000)
    await host.pass_intervals()
    assert host.means()[0] == 8 / 2


async def test_triton_that_restarts_resets_its_own_counters_only(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SECONDS", 0.5)
    host.fakes[0].query_refusal = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'x'"
    host.fakes[1].may_tell.clear()
    await host.pass_intervals()
    found = host.read()
    assert (found["triton_up,0"], found["triton_up,1"], found["triton_inference_count_total,1,tiny,1"]) == (1, 0, 100)
    monkeypatch.setattr(metrics, "_SECONDS", 60.0)
    host.fakes[0].query_refusal = None
    host.fakes[1].may_tell.set()
    tell(host.fakes[1], 6, 2, 3, 6_000_000, 3, 3_000_000)
    await host.pass_intervals()
    found = host.read()

    assert [found[f"triton_inference_count_total,{triton},tiny,1"] for triton in (0, 1)] == [2, 6]
    assert (found["triton_up,1"], found["triton_batch_size,tiny"]) == (1, 3)
