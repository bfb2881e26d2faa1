"""Load above the gateway's capacity: goodput, latency of responses and rejections, memory, and recovery."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop

from bench.experiments.options import Commands, add_shared, describe
from bench.harness.contest import meters_of
from bench.harness.errors import ContestantError
from bench.harness.lineup import DEFAULT, Contestant, Lineup, lineup_of
from bench.harness.meters import Meters, find_workers, sampled_memory
from bench.harness.processes import Running
from bench.load.driver import Driver
from bench.load.driver import run as drive
from bench.load.images import Sample, coco_samples, unlabelled_samples
from bench.load.outcome import Outcome
from bench.models.repository import YOLO
from bench.report.measurements import Measurement, Overload, Run
from bench.report.progress import say
from bench.report.records import make_record, save_record
from bench.report.text import overview

MODELS = ("wait_20", "wait_50_batch8", YOLO)
FACTORS = {"open_3": 3, "open_10": 10, "open_30": 30}
"""Phases with a constant rate, as a multiple of the peak."""
CROWDS = {"polite": True, "at_once": False}
"""Phases with many clients that wait for responses, and whether they also respect Retry-After."""
PHASES = (*FACTORS, *CROWDS)
PEAK = "peak"
PEAK_CLIENTS = (4, 8, 16, 32)
RECOVERY_SECONDS = 5.0
"""Time between the end of a burst and the measurement of a single client."""
WATCH_SECONDS = 10.0
"""Duration of memory measurement after the end of a burst."""
PROBE_SECONDS = 2.0
"""Duration of the measurement of a single client."""

_CROWD = 512
_CONNECTIONS = 2000  # of a constant rate; the gateway rejects requests long before so many are in progress
_PEAK_SHARE = 0.5  # fraction of the duration of a burst, per number of clients
_WARM_UP_CLIENTS, _WARM_UP_SECONDS = 4, 1.0
_PROBE_PATIENCE = 8.0


def run(options: argparse.Namespace) -> int:
    """Measure each phase with each model, and print one table per model."""
    runs: list[Run] = []
    try:
        with lineup_of(options.models, options.workers) as lineup:
            for model in options.models:
                found = list(_measure(lineup, model, options))
                runs += found
                say()
                print(f"\n{model}, {options.workers} workers, {options.seconds:g} s\n{overview(found)}", flush=True)
    finally:
        if options.json is not None and runs:
            save_record(options.json, make_record(describe(options), runs))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("overload", help="what the gateway does with more load than it can bear")
    command.add_argument("--models", nargs="+", choices=MODELS, default=["wait_20"], help="models to use")
    command.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="loads to send; by default all")
    add_shared(command, seconds=8.0, workers=2, json=None)
    command.set_defaults(run=run)


def _measure(lineup: Lineup, model: str, options: argparse.Namespace) -> Iterator[Run]:
    """Measure the peak of one model, with the best number of clients that wait for responses, and then each phase."""
    samples = coco_samples() if model == YOLO else unlabelled_samples()
    contestant = lineup.contestant(DEFAULT, model)
    say(f"{model}: {PEAK}")
    with _started(lineup, contestant, samples) as (server, url):
        peaks = []
        for clients in PEAK_CLIENTS:
            meters = meters_of(lineup, contestant, server)
            measured = meters.read(drive(Driver(url, samples, options.seconds * _PEAK_SHARE).closed(clients)))
            goodput = measured.outcome.goodput
            peaks.append(_to_run(model, measured, Overload(phase=PEAK, offered=goodput, peak=goodput), clients=clients))
    best = max(peaks, key=lambda one: one.outcome.goodput)
    yield best
    for phase in options.phases:
        say(f"{model}: {phase}")
        rate = round(FACTORS[phase] * best.outcome.goodput, 1) if phase in FACTORS else None
        try:
            with _started(lineup, contestant, samples) as (server, url):
                before = drive(Driver(url, samples, PROBE_SECONDS).closed(1))
                meters = meters_of(lineup, contestant, server)
                with sampled_memory(find_workers(server.process, contestant.workers)) as memory:
                    measured, after = uvloop.run(_load_and_watch(url, samples, phase, rate, options.seconds, meters))
        except (ContestantError, OSError) as error:
            print(f"{model}, {phase} is left out: {error}", file=sys.stderr)
            continue
        overload = Overload(
            phase=phase,
            offered=rate or measured.outcome.requests / measured.outcome.seconds,
            peak=best.outcome.goodput,
            before_ms=_median(before),
            after_ms=after,
            memory=memory,
        )
        yield _to_run(model, measured, overload, rate=rate, clients=None if rate else _CROWD)


@contextmanager
def _started(lineup: Lineup, contestant: Contestant, samples: Sequence[Sample]) -> Iterator[tuple[Running, str]]:
    """Start and warm up a server; yield it and the URL of the load."""
    with lineup.start(contestant) as server:
        url = f"{server.url}/detect"
        drive(Driver(url, samples, _WARM_UP_SECONDS).closed(_WARM_UP_CLIENTS))
        yield server, url


async def _load_and_watch(  # noqa: PLR0913, PLR0917 - the parts of a load
    url: str, samples: Sequence[Sample], phase: str, rate: float | None, seconds: float, meters: Meters
) -> tuple[Measurement, float | None]:
    """Send a burst; measure a single client some time after the last request was due, even if requests are unanswered."""
    driver = Driver(url, samples, seconds)
    if rate is None:
        load = driver.closed(_CROWD, is_polite=CROWDS[phase], spread_seconds=seconds / 10)
    else:
        load = driver.constant(rate, _CONNECTIONS)

    async def measure() -> Measurement:
        return await asyncio.to_thread(meters.read, await load)

    async def probe() -> float | None:
        await asyncio.sleep(seconds + RECOVERY_SECONDS)
        try:
            return _median(await Driver(url, samples, PROBE_SECONDS, patience=_PROBE_PATIENCE).closed(1))
        except OSError:  # the server no longer listens: it has not recovered
            return None

    measured, after, _ = await asyncio.gather(measure(), probe(), asyncio.sleep(seconds + WATCH_SECONDS))
    return measured, after


def _to_run(model: str, measured: Measurement, overload: Overload, **load: Any) -> Run:  # noqa: ANN401 - clients or rate
    return Run.of(measured, contestant=DEFAULT, mode=f"overload: {model}", model=model, overload=overload, **load)


def _median(outcome: Outcome) -> float | None:
    return outcome.percentile(50) if outcome.correct else None
