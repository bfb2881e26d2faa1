"""Latency at a constant rate below the capacity: p99 relative to p50."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.experiments.options import Commands, add_shared, positive
from bench.experiments.progress import say
from bench.harness.contest import WARM_UP_SECONDS
from bench.harness.lineup import BEFORE, NEREID, Lineup
from bench.harness.minimal_server import minimal_server
from bench.harness.processes import Running, require_checkout
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import Sample, unlabelled_samples
from bench.load.open_loop import drive_open_loop
from bench.report.text import number, table

MINIMAL = "http and triton"
"""The minimal server, which forwards bodies to Triton, to show the effect of client, Triton and machine."""

_CAPACITY_SHARE = 0.5  # fraction of the duration of a measurement


class Round(NamedTuple):
    """One server in one round."""

    capacity: float
    """Requests per second of clients that wait for responses."""
    p50: float
    """Milliseconds since a request was due, as is `p99`."""
    p99: float
    failed: float
    """Share of requests without a correct response."""


def run(options: argparse.Namespace) -> int:
    """Measure the capacity of each server and its latency at a share of the capacity; print the medians of the rounds."""
    before = require_checkout(options.before) if options.before else None
    names = [MINIMAL, *(name + end for name in options.only for end in (["", BEFORE] if before else [""]))]
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    samples = unlabelled_samples(options.images)
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        lineup = Lineup(triton, options.workers, Path(logs), before=before)

        def start(name: str) -> AbstractContextManager[Running]:
            if name == MINIMAL:
                return minimal_server(Path(logs), options.workers, triton.settings)
            return lineup.start(lineup.contestant(name, "null"))

        for turn in range(options.rounds):
            for name in names:
                say(f"round {turn + 1}: {name}")
                with start(name) as server:
                    rounds[name].append(_measure(f"{server.url}/detect", samples, options))
    say()
    print(table([("server", "capacity/s", "p50", "p99", "p99 / p50", "failed"), *(_row(*one) for one in rounds.items())]))
    print(f"open loop at {options.share:.0%} of the capacity; null model; ms; medians of {options.rounds} rounds")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("tail", help="p50 and p99 at a constant rate below the capacity")
    command.add_argument("--only", nargs="+", choices=NEREID, default=["nereid_shm", "nereid_file"], help="servers to measure")
    command.add_argument("--share", type=positive, default=0.7, help="the rate, as a part of the capacity")
    add_shared(command, seconds=6.0, rounds=3, clients=32, workers=2, images=None, before=None)
    command.set_defaults(run=run)


def _measure(url: str, samples: Sequence[Sample], options: argparse.Namespace) -> Round:
    closed_seconds = options.seconds * _CAPACITY_SHARE
    drive(drive_closed_loop(url, samples, clients=options.clients, seconds=max(WARM_UP_SECONDS, closed_seconds / 4)))
    capacity = drive(drive_closed_loop(url, samples, clients=options.clients, seconds=closed_seconds)).rate
    outcome = drive(drive_open_loop(url, samples, rate=capacity * options.share, seconds=options.seconds))
    return Round(capacity, outcome.percentile(50), outcome.percentile(99), outcome.failed)


def _row(name: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    ratio = median(one.p99 / one.p50 for one in rounds)
    capacity, p50, p99, failed = (median(column) for column in zip(*rounds, strict=True))
    return name, number(capacity), number(p50), number(p99), number(ratio), f"{failed:.1%}"
