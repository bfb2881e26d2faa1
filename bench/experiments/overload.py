"""Load above the gateway's capacity: goodput, latency of responses and rejections, memory, and recovery."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments.options import Commands, add_shared, describe, positive
from bench.experiments.progress import say
from bench.harness.burst import PEAK, Burst, measure_burst, measure_peak
from bench.harness.errors import ContestantError
from bench.harness.lineup import BEFORE, DEFAULT, Lineup
from bench.harness.processes import require_checkout
from bench.harness.triton import fixture_triton
from bench.load.images import coco_samples, unlabelled_samples
from bench.models.repository import YOLO
from bench.report.measurements import Run
from bench.report.overload_text import overload_text
from bench.report.records import make_record, save_record

MODELS = ("wait_20", "wait_200", "wait_50_batch8", YOLO)
FACTORS = {"open_3": 3, "open_10": 10, "open_30": 30}
"""Phases with a constant rate, as a multiple of the peak."""
CROWDS = {"polite": True, "at_once": False}
"""Phases with many clients that wait for responses, and whether they also respect Retry-After."""
PHASES = (*FACTORS, *CROWDS)

_CROWD = 512
_PEAK_SHARE = 0.5  # fraction of the duration of a burst, per number of clients


def run(options: argparse.Namespace) -> int:
    """Measure each phase with each model, and print one table per model."""
    before = require_checkout(options.before) if options.before else None
    names = [DEFAULT, f"{DEFAULT}{BEFORE}"] if before else [DEFAULT]
    runs: list[Run] = []
    try:
        with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton({YOLO} & {*options.models}) as triton:
            lineup = Lineup(triton, options.workers, Path(logs), before=before)
            for model in options.models:
                found = list(_measure(lineup, names, model, options))
                runs += found
                say()
                print(f"\n{model}, {options.workers} workers, {options.seconds:g} s\n{overload_text(found)}", flush=True)
    finally:
        if options.json is not None and runs:
            save_record(options.json, make_record(describe(options), runs))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("overload", help="what the gateway does with more load than it can bear")
    command.add_argument("--models", nargs="+", choices=MODELS, default=["wait_20"], help="models to use")
    command.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="loads to send; by default all")
    command.add_argument(
        "--peak", type=positive, metavar="RATE", help="correct answers per second without overload; by default they are measured"
    )
    add_shared(command, seconds=8.0, workers=2, images=None, before=None, json=None)
    command.set_defaults(run=run)


def _measure(lineup: Lineup, names: Sequence[str], model: str, options: argparse.Namespace) -> Iterator[Run]:
    """Measure one model; the servers alternate in each phase."""
    samples = coco_samples(options.images) if model == YOLO else unlabelled_samples(options.images)
    contestants = [lineup.contestant(name, model) for name in names]
    peaks = []
    for contestant in contestants if options.peak is None else []:
        say(f"{model}: {PEAK}, {contestant.name}")
        peaks.append(measure_peak(lineup, contestant, samples, options.seconds * _PEAK_SHARE))
    yield from peaks
    peak = options.peak or max(one.outcome.goodput for one in peaks)
    for phase in options.phases:
        for contestant in contestants:
            say(f"{model}: {phase}, {contestant.name}")
            try:
                yield measure_burst(lineup, contestant, samples, _burst(phase, peak), options.seconds, peak)
            except ContestantError as error:
                print(f"{model}, {phase}: {contestant.name} is left out: {error}", file=sys.stderr)


def _burst(phase: str, peak: float) -> Burst:
    if phase in FACTORS:
        return Burst(phase, rate=round(FACTORS[phase] * peak, 1))
    return Burst(phase, clients=_CROWD, is_polite=CROWDS[phase])
