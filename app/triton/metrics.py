"""What the Tritons have done since any worker of the host was asked for metrics the last time."""

from asyncio import gather
from collections.abc import Collection, Iterator, Sequence
from time import monotonic_ns

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from app.errors import GatewayError, TritonUnavailable
from app.telemetry.instruments import Table
from app.triton.backend import TritonBackend
from app.triton.statistics import ModelStatistics, read_statistics

# A Triton that does not answer delays all other metrics by as much.
_SECONDS = 1.0
_READ_AT = "triton statistics read at"
_COUNTER = "triton statistics"


async def read_metrics(servers: Sequence[TritonBackend], table: Table, models: Collection[str]) -> list[Metric]:
    """Read the statistics of all Tritons, and compare them with those that the workers' table has.

    Args:
        servers: The Tritons.
        table: Where all workers find the last statistics.
        models: Names of those of interest; Triton may have many more.

    Returns:
        Whether each Triton answers, and means over all of them per model that has run since.
    """
    up = GaugeMetricFamily("triton_up", "Whether Triton answers.", labels=["triton"])
    done: dict[str, ModelStatistics] = {}
    for server, (is_up, counted) in zip(servers, await gather(*(_read(server, table, models) for server in servers)), strict=True):
        up.add_metric([server.address], int(is_up))
        for model, statistics in counted.items():
            done[model] = done.get(model, ModelStatistics()).plus(statistics)
    batch_size = GaugeMetricFamily("triton_batch_size", "Images per batch, mean since the last scrape.", labels=["model"])
    queue_time = GaugeMetricFamily(
        "triton_queue_time_ms", "Time of a request in Triton's queue, mean since the last scrape.", labels=["model"]
    )
    inference_time = GaugeMetricFamily(
        "triton_inference_time_ms", "Time of a batch in the model, mean since the last scrape.", labels=["model"]
    )
    for model, counters in done.items():
        if counters.executions:
            batch_size.add_metric([model], counters.batch_size)
            queue_time.add_metric([model], counters.queue_ms)
            inference_time.add_metric([model], counters.inference_ms)
    return [up, batch_size, queue_time, inference_time]


async def _read(server: TritonBackend, table: Table, models: Collection[str]) -> tuple[bool, dict[str, ModelStatistics]]:
    """Return whether a Triton answers, and what its models have done since the last time; nothing if it does not tell."""
    asked_at = monotonic_ns()
    try:
        statistics = await read_statistics(server.client, _SECONDS)
    except TritonUnavailable:
        return False, {}
    except GatewayError:  # it may restrict its statistics
        return True, {}
    known = {model: counters for model, counters in statistics.items() if model in models}
    return True, dict(_exchange(table, table.alias(server.address), known, asked_at))


def _exchange(
    table: Table, triton: str, statistics: dict[str, ModelStatistics], asked_at: int
) -> Iterator[tuple[str, ModelStatistics]]:
    """Put statistics into this worker's row of the table; iterate over what each model has done since the last ones of any."""
    read_at_column = table.gauge(f"{_READ_AT}:{triton}")
    read_at = table.values(read_at_column)
    newest = read_at.index(max(read_at))
    if read_at[newest] > asked_at:  # another scrape has overtaken this one
        return
    for model, now in statistics.items():
        columns = [table.gauge(f"{_COUNTER}:{triton}:{field}:{model}") for field in ModelStatistics._fields]
        before = ModelStatistics(*(table.values(column)[newest] for column in columns))
        for column, value in zip(columns, now, strict=True):
            table.set(column, value)
        yield model, now.since(before)
    table.set(read_at_column, asked_at)
