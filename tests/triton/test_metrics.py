"""What Triton has done between two scrapes, whichever workers they reach."""

import asyncio
import time

import grpc
import pytest

from app.main import create_app
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.metrics import read_metrics
from tests.fakes.triton import FakeTriton
from tests.scrape import scrape
from tests.support import OpenTable, finds, started
from tests.triton.test_statistics import add_version

Fake = tuple[FakeTriton, TritonClient]


async def read(client: TritonClient, table: WorkerTable) -> dict[str, float]:
    """Read the metrics of one Triton by name and model."""
    return {
        ",".join((sample.name, *(value for label, value in sample.labels.items() if label != "triton"))): sample.value
        for family in await read_metrics([TritonBackend(client, table)], table, {"tiny"})
        for sample in family.samples
    }


def count(fake: FakeTriton, *counters: int) -> None:
    """Let a fake tell these counters of its model, in the order of `ModelStatistics`."""
    del fake.statistics.model_stats[:]
    add_version(fake, "tiny", "1", *counters)


async def test_means_are_those_since_the_last_scrape(fake_triton: Fake, open_table: OpenTable) -> None:
    """The first scrape shows the means since Triton's start."""
    (fake, client), tables = fake_triton, [open_table(), open_table()]
    for table in tables:
        table.refresh()
    count(fake, 8, 2, 4, 4_000_000, 4, 20_000_000)
    assert await read(client, tables[0]) == {
        "triton_up": 1,
        "triton_batch_size,tiny": 4,
        "triton_queue_time_ms,tiny": 1,
        "triton_inference_time_ms,tiny": 5,
    }
    count(fake, 10, 4, 6, 10_000_000, 6, 22_000_000)

    assert await read(client, tables[1]) == {
        "triton_up": 1,
        "triton_batch_size,tiny": 1,
        "triton_queue_time_ms,tiny": 3,
        "triton_inference_time_ms,tiny": 1,
    }


async def test_a_model_that_did_not_run_has_no_means(fake_triton: Fake, table: WorkerTable) -> None:
    fake, client = fake_triton
    count(fake, 8, 2, 4, 4_000_000, 4, 20_000_000)
    await read(client, table)

    assert await read(client, table) == {"triton_up": 1}


async def test_counters_of_a_restarted_triton_begin_anew(fake_triton: Fake, table: WorkerTable) -> None:
    """A value below the last one was counted since the restart."""
    fake, client = fake_triton
    count(fake, 100, 50, 100, 100, 100, 100)
    await read(client, table)
    count(fake, 6, 2, 3, 6_000_000, 3, 3_000_000)

    assert (await read(client, table))["triton_batch_size,tiny"] == 3


async def test_a_triton_that_does_not_tell_is_up(fake_triton: Fake, table: WorkerTable) -> None:
    """It answers, but its statistics are not accessible."""
    fake, client = fake_triton
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-x'"
    found = await read(client, table)

    assert found == {"triton_up": 1}


async def test_only_models_in_use_are_told_of(fake_triton: Fake, table: WorkerTable) -> None:
    """A Triton may have hundreds of other models."""
    fake, client = fake_triton
    for number in range(100):
        add_version(fake, f"other-{number}", "1", 1, 1, 1, 1, 1, 1)
    add_version(fake, "tiny", "1", 1, 1, 1, 1, 1, 1)
    before = len(table.gauges())
    found = await read(client, table)

    assert {name for name in found if name != "triton_up"} == {
        "triton_batch_size,tiny",
        "triton_queue_time_ms,tiny",
        "triton_inference_time_ms,tiny",
    }
    assert len(table.gauges()) - before <= 8


async def test_an_answer_that_was_overtaken_is_not_told(fake_triton: Fake, open_table: OpenTable) -> None:
    """Its counters are older than those that another scrape has left, and would be counted twice."""
    (fake, client), tables = fake_triton, [open_table(), open_table()]
    for table in tables:
        table.refresh()
    count(fake, 1, 1, 1, 1, 1, 1)
    await read(client, tables[0])
    fake.may_tell.clear()
    late = asyncio.ensure_future(read(client, tables[0]))
    tables[1].set(tables[1].gauge(f"triton statistics read at:{tables[1].alias(fake.url)}"), time.monotonic_ns() + 3600 * 10**9)
    count(fake, 2, 2, 2, 2, 2, 2)
    fake.may_tell.set()

    assert await late == {"triton_up": 1}


@pytest.mark.parametrize("silence", ["hangs", "refuses"])
async def test_a_triton_that_does_not_answer_is_down(
    fake_triton: Fake, table: WorkerTable, silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, client = fake_triton
    monkeypatch.setattr("app.triton.metrics._SECONDS", 0.2)
    if silence == "hangs":
        fake.may_tell.clear()
    else:
        fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"

    assert await read(client, table) == {"triton_up": 0}
    fake.may_tell.set()


@pytest.mark.usefixtures("triton")
async def test_a_real_triton_tells_what_it_has_done(settings: Settings) -> None:
    async with started(create_app(settings)) as client:
        assert await finds(client, "six_columns")
        await scrape(client)
        for _ in range(3):
            assert await finds(client, "six_columns")
        found = await scrape(client)

    assert found[f'triton_up{{triton="{settings.triton_address}"}}'] == 1
    assert found['triton_batch_size{model="six_columns"}'] == 1
    assert found['triton_inference_time_ms{model="six_columns"}'] > 0
    assert found['triton_queue_time_ms{model="six_columns"}'] >= 0
    assert 'triton_batch_size{model="raw_yolo"}' not in found
