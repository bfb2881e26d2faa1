"""Counters of the Tritons, and means of 30 s, the same whichever worker is asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.resilience.worker_table import TableView, WorkerTable
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.triton import metrics
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.transport import Transport
from tests.fakes.triton import FakeTriton, serving
from tests.scrape import Samples, scrape
from tests.support import OpenTable, eventually, finds, started, until_ready
from tests.triton.test_statistics import add_version
from tests.world import Time, time_of_app

SECONDS = 1000
"""Of an interval, so that none begins by the real time that a busy machine takes."""
IDLE = pytest.approx(float("nan"), nan_ok=True)


def tell(fake: FakeTriton, *counters: int) -> None:
    """Set the counters that a fake returns for its model, in the order of `ModelStatistics`."""
    del fake.statistics.model_stats[:]
    add_version(fake, "tiny", "1", *counters)


async def until_read(table: TableView, time: Time, seconds: int = SECONDS) -> None:
    """Let time pass until the next reading that has not begun yet."""
    number = int(time() // seconds) + 1
    await time.skip(seconds)
    await eventually(lambda: msgspec.msgpack.decode(table.published(), type=list[metrics.Reading])[-1].number >= number)


class Host:
    """Workers of a host, which read two Tritons."""

    def __init__(self, time: Time) -> None:
        self.fakes = [FakeTriton(), FakeTriton()]
        self.tables: list[WorkerTable] = []
        self.workers: list[AsyncExitStack] = []
        """Each ends with its stack."""
        self._time = time

    async def start_worker(self) -> None:
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
        for _ in range(intervals):
            await until_read(self.tables[-1], self._time)

    def read(self, worker: int = -1) -> dict[str, float]:
        """Return what a worker exports, by the metrics' names, models and numbers of the Tritons."""
        numbers = {fake.url: str(number) for number, fake in enumerate(self.fakes)}
        return {
            ",".join((sample.name, *(numbers.get(value, value) for value in sample.labels.values()))): sample.value
            for family in metrics.triton_metrics(self.tables[worker])
            for sample in family.samples
        }


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
        add_version(host.fakes[1], "not in use", "1", 1, 1, 1, 1, 1, 1)
        for fake in host.fakes:
            await stack.enter_async_context(serving(fake))
        for _ in range(2):
            await host.start_worker()
            stack.push_async_callback(host.workers[-1].aclose)
        await eventually(lambda: bool(host.tables[0].published()))
        yield host


async def test_workers_export_the_same(host: Host) -> None:
    assert (
        host.read(0)
        == host.read(1)
        == {
            "triton_up,0": 1,
            "triton_up,1": 1,
            "triton_inference_count_total,0,tiny,1": 2,
            "triton_inference_count_total,1,tiny,1": 100,
            "triton_execution_count_total,0,tiny,1": 1,
            "triton_execution_count_total,1,tiny,1": 10,
            "triton_queue_seconds_total,0,tiny,1": 0.001,
            "triton_queue_seconds_total,1,tiny,1": 0.01,
            "triton_compute_seconds_total,0,tiny,1": 0.005,
            "triton_compute_seconds_total,1,tiny,1": 0.05,
            "triton_batch_size,tiny": IDLE,
            "triton_queue_time_ms,tiny": IDLE,
            "triton_inference_time_ms,tiny": IDLE,
        }
    )


async def test_means_cover_30_seconds(host: Host) -> None:
    tell(host.fakes[0], 10, 3, 3, 5_000_000, 3, 15_000_000)
    tell(host.fakes[1], 108, 12, 12, 20_000_000, 12, 80_000_000)
    await host.pass_intervals()
    for intervals in (0, 5):
        await host.pass_intervals(intervals)
        found = host.read()
        assert [found[f"triton_{name},tiny"] for name in ("batch_size", "queue_time_ms", "inference_time_ms")] == [4, 3.5, 10]
    await host.pass_intervals()

    assert host.read()["triton_batch_size,tiny"] == IDLE


async def test_a_triton_that_restarts_resets_its_own_counters_only(host: Host) -> None:
    host.fakes[1].query_refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"
    await host.pass_intervals()
    found = host.read()
    assert (found["triton_up,0"], found["triton_up,1"], found["triton_inference_count_total,1,tiny,1"]) == (1, 0, 100)
    host.fakes[1].query_refusal = None
    tell(host.fakes[1], 6, 2, 3, 6_000_000, 3, 3_000_000)
    await host.pass_intervals()
    found = host.read()

    assert [found[f"triton_inference_count_total,{triton},tiny,1"] for triton in (0, 1)] == [2, 6]
    assert (found["triton_up,1"], found["triton_batch_size,tiny"]) == (1, 3)


async def test_another_worker_goes_on_if_the_reader_ends(host: Host) -> None:
    tell(host.fakes[0], 8, 2, 2, 2_000_000, 2, 10_000_000)
    await host.pass_intervals()
    await host.workers[0].aclose()
    host.tables[1].refresh()
    tell(host.fakes[0], 18, 3, 3, 3_000_000, 3, 15_000_000)
    await host.pass_intervals()

    assert host.read()["triton_batch_size,tiny"] == (18 - 2) / (3 - 1)


async def test_silent_triton_is_down_and_a_restricted_one_is_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SECONDS", 0.5)
    host.fakes[0].may_tell.clear()
    host.fakes[1].query_refusal = (
        grpc.StatusCode.UNAVAILABLE,
        "This protocol is restricted, expecting header 'x'",
    )
    await host.pass_intervals()
    host.fakes[0].may_tell.set()

    assert [host.read()[f"triton_up,{triton}"] for triton in (0, 1)] == [0, 1]


@pytest.mark.system
@pytest.mark.usefixtures("open_table")
async def test_a_real_triton(own_triton: tuple[Settings, EmbeddedTriton]) -> None:
    settings, server = own_triton
    images, mean = (
        f'triton_inference_count_total{{model="six_columns",triton="{settings.triton_address}",version="1"}}',
        'triton_batch_size{model="six_columns"}',
    )
    async with started(create_app(settings)) as often, started(create_app(settings)) as rarely:
        view = TableView()
        with time_of_app() as time:
            await time.skip(5 - time() % 5)

            async def pass_intervals(intervals: int = 1) -> Samples:
                seen: Samples = {}
                for _ in range(intervals):
                    await until_read(view, time, 5)
                    seen = await scrape(often)
                found = {name: value for name, value in (await scrape(rarely)).items() if name.startswith("triton_")}
                assert {name: seen[name] for name in found} == pytest.approx(found, nan_ok=True)
                return found

            before = await pass_intervals()
            for _ in range(3):
                assert await finds(rarely)
            after = await pass_intervals()
            assert (after[images] - before[images], after[mean]) == (3, 1)
            assert (await pass_intervals(5))[mean] == 1
            idle = await pass_intervals()
            assert idle[images] == after[images]
            assert idle[mean] == IDLE
            server.stop()
            server.start()
            await until_ready(rarely)
            assert await finds(rarely)
            await pass_intervals()
            restarted = await pass_intervals()
        view.close()

    assert 1 <= restarted[images] < after[images]
    assert restarted[mean] == 1
