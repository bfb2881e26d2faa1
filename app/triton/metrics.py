"""Metrics from the Tritons' statistics, which one worker of the host reads for all."""

import asyncio
from itertools import pairwise
from math import nan
from time import monotonic
from typing import NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from app.errors import TritonUnavailable
from app.model.reference import split_reference
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from app.triton.statistics import ModelStatistics, read_statistics

_INTERVAL_SECONDS = 5
# Intervals that the means cover.
_WINDOW = 6
# Time-out of an answer.
_SECONDS = 1.0


class Reading(NamedTuple):
    """What all Tritons have reported at a time."""

    number: int
    """The time on the `time.monotonic` clock, in intervals."""
    up: dict[str, bool]
    """Whether each Triton answers, by address."""
    counters: dict[tuple[str, str, str], ModelStatistics]
    """Counters by Triton, model and version; the last known ones of a Triton that does not report any."""


async def read_regularly(pool: TritonPool, table: WorkerTable, metrics: Metrics) -> None:
    """Publish the readings of the last 30 s whenever this worker is the host's first one; never returns.

    All workers wake up at the same times, so that the readings continue if the first worker ends. Only the models in `metrics` are
    read, because Triton may have many more.
    """
    while True:
        number = int(monotonic() // _INTERVAL_SECONDS)
        readings = _last_readings(table)
        if table.is_first and readings[-1].number < number:
            models = {split_reference(model)[0] for model in metrics.models()}
            newest = await _read(pool, models, number, readings[-1])
            recent = [one for one in readings if one.number >= number - _WINDOW]
            table.publish(msgspec.msgpack.encode([*recent, newest]))
        await asyncio.sleep(_INTERVAL_SECONDS - monotonic() % _INTERVAL_SECONDS)


def triton_metrics(table: WorkerTable) -> list[Metric]:
    """Return whether each Triton answers, its counters, and the means of each model over all Tritons, NaN if it has not run."""
    labels = ["triton", "model", "version"]
    up = GaugeMetricFamily("triton_up", "Whether Triton answers.", labels=labels[:1])
    images = CounterMetricFamily("triton_inference_count", "Images that Triton has processed.", labels=labels)
    batches = CounterMetricFamily("triton_execution_count", "Batches that Triton has processed.", labels=labels)
    queue = CounterMetricFamily("triton_queue_seconds", "Time of requests in Triton's queue.", labels=labels)
    compute = CounterMetricFamily("triton_compute_seconds", "Time of requests' batches in the model.", labels=labels)
    means = [
        GaugeMetricFamily("triton_batch_size", "Images per batch, mean of 30 s.", labels=["model"]),
        GaugeMetricFamily("triton_queue_time_ms", "Time of a request in Triton's queue, mean of 30 s.", labels=["model"]),
        GaugeMetricFamily("triton_inference_time_ms", "Time of a batch in the model, mean of 30 s.", labels=["model"]),
    ]
    readings = _last_readings(table)
    for triton, is_up in readings[-1].up.items():
        up.add_metric([triton], is_up)
    for key, now in readings[-1].counters.items():
        images.add_metric(key, now.inferences)
        batches.add_metric(key, now.executions)
        queue.add_metric(key, now.queue_ns / 1e9)
        compute.add_metric(key, now.compute_infer_ns / 1e9)
    done: dict[str, ModelStatistics] = {}
    for before, after in pairwise([readings[0], *readings]):
        for key, now in after.counters.items():
            done[key[1]] = done.get(key[1], ModelStatistics()).plus(now.since(before.counters.get(key, now)))
    for model, work in done.items():
        for family, mean in zip(means, (work.batch_size, work.queue_ms, work.inference_ms), strict=True):
            family.add_metric([model], mean if work.executions else nan)
    return [up, images, batches, queue, compute, *means]


def _last_readings(table: WorkerTable) -> list[Reading]:
    try:
        return msgspec.msgpack.decode(table.published(), type=list[Reading])
    except msgspec.DecodeError:
        return [Reading(-1, {}, {})]


async def _read(pool: TritonPool, models: set[str], number: int, last: Reading) -> Reading:
    servers = pool.servers.copy()
    answers = await asyncio.gather(*(read_statistics(server.client, _SECONDS) for server in servers), return_exceptions=True)
    reading = Reading(number, {}, {})
    for triton, answer in zip([server.address for server in servers], answers, strict=True):
        reading.up[triton] = not isinstance(answer, TritonUnavailable)
        if isinstance(answer, dict):
            found = {(triton, *key): counters for key, counters in answer.items() if key[0] in models}
        else:  # Triton may restrict access to its statistics
            found = {key: counters for key, counters in last.counters.items() if key[0] == triton}
        reading.counters.update(found)
    return reading
