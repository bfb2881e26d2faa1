"""What Triton has done since any worker of the host was asked for metrics the last time."""

from collections.abc import Collection, Iterator
from time import monotonic_ns

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from app.errors import GatewayError, TritonUnavailable
from app.telemetry.instruments import Table
from app.triton.client import TritonClient
from app.triton.statistics import ModelStatistics, read_statistics

# A Triton that does not answer delays all other metrics by as much.
_SECONDS = 1.0
_READ_AT = "triton statistics read at"
_COUNTER = "triton statistics"


async def read_metrics(client: TritonClient, table: Table, models: Collection[str]) -> list[Metric]:
    """Read Triton's statistics, and compare them with those that the workers' table has.

    Args:
        client: Of the Triton.
        table: Where all workers find the last statistics.
        models: Those of interest; Triton may have many more.

    Returns:
        Means per model that has run since; none if Triton does not tell, or does not answer.
    """
    up = GaugeMetricFamily("triton_up", "Whether Triton answers.")
    statistics: dict[str, ModelStatistics] = {}
    asked_at = monotonic_ns()
    try:
        statistics = await read_statistics(client, _SECONDS)
        up.add_metric([], 1)
    except TritonUnavailable:
        up.add_metric([], 0)
    except GatewayError:  # it may restrict its statistics
        up.add_metric([], 1)
    batch_size = GaugeMetricFamily("triton_batch_size", "Images per batch, mean since the last scrape.", labels=["model"])
    queue_time = GaugeMetricFamily(
        "triton_queue_time_ms", "Time of a request in Triton's queue, mean since the last scrape.", labels=["model"]
    )
    inference_time = GaugeMetricFamily(
        "triton_inference_time_ms", "Time of a batch in the model, mean since the last scrape.", labels=["model"]
    )
    known = {model: counters for model, counters in statistics.items() if model in models}
    for model, done in _exchange(table, known, asked_at):
        if done.executions:
            batch_size.add_metric([model], done.batch_size)
            queue_time.add_metric([model], done.queue_ms)
            inference_time.add_metric([model], done.inference_ms)
    return [up, batch_size, queue_time, inference_time]


def _exchange(table: Table, statistics: dict[str, ModelStatistics], asked_at: int) -> Iterator[tuple[str, ModelStatistics]]:
    """Put statistics into this worker's row of the table; iterate over what each model has done since the last ones of any."""
    read_at = table.values(table.column(_READ_AT))
    newest = read_at.index(max(read_at))
    if read_at[newest] > asked_at:  # another scrape has overtaken this one
        return
    for model, now in statistics.items():
        columns = [table.column(f"{_COUNTER}:{field}:{model}") for field in ModelStatistics._fields]
        before = ModelStatistics(*(table.values(column)[newest] for column in columns))
        for column, value in zip(columns, now, strict=True):
            table.set(column, value)
        yield model, now.since(before)
    table.set(table.column(_READ_AT), asked_at)
