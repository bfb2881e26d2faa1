"""CPU time of metrics, per request and per scrape."""

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time

from app.api.context import RequestContext
from app.api.reports.metrics import count_request
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics, render
from app.telemetry.timing import STAGES
from bench.experiments.options import Commands, add_shared

_REQUESTS, _SCRAPES = 20_000, 100


def run(options: argparse.Namespace) -> int:
    """Print the medians."""
    table = WorkerTable()
    metrics = Metrics(table, "0")
    context = RequestContext("bench", "image/jpeg")
    for stage in STAGES:
        context.timing.lap(stage)

    def handle_request() -> None:
        metrics.active_requests.add(1)
        metrics.inferences.add(1, "shm")
        metrics.active_requests.add(-1)
        count_request(metrics, context, "/detect", 200)

    def scrape() -> None:
        render(metrics.collect(), "")

    for name, work, times in (("request", handle_request, _REQUESTS), ("scrape", scrape, _SCRAPES)):
        found = [_microseconds(work, times) for _ in range(options.rounds)]
        print(f"{name}: {median(found):.1f} us ({min(found):.1f}..{max(found):.1f})")
    table.close()
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("metrics", help="CPU time of counting a request, and of a scrape")
    add_shared(command, rounds=5)
    command.set_defaults(run=run)


def _microseconds(work: Callable[[], None], times: int) -> float:
    """Return the CPU time of one call."""
    started = process_time()
    for _ in range(times):
        work()
    return (process_time() - started) / times * 1e6
