"""Throughput over the number of Tritons, workers and clients, and batch sizes of calls to Triton."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from app.settings.schema import PREFIX
from bench.experiments.options import Commands, add_shared, count, describe
from bench.experiments.progress import say
from bench.harness.batch_sizes import read_batch_sizes
from bench.harness.contest import WARM_UP_SECONDS, Load, measure
from bench.harness.lineup import Contestant, Lineup
from bench.harness.processes import Running
from bench.harness.triton import Triton, embedded_tritons, settings_for
from bench.load.images import unlabelled_samples
from bench.models.repository import write_fixture
from bench.report.measurements import Measurement
from bench.report.records import make_record, save_record
from bench.report.scaling import ScalePoint, Scaling, scaling_text

OVER = ("tritons", "workers")
SLOW, FAST = "wait_80_file", "null"
"""The model for scaling Tritons, which limits the throughput, and the model for scaling workers."""

_CONTESTANTS = {SLOW: "nereid_file", FAST: "nereid_shm"}


class Server(NamedTuple):
    """A running gateway of one size."""

    contestant: Contestant
    running: Running
    tritons: Sequence[Triton]
    """The Tritons that it uses."""


def run(options: argparse.Namespace) -> int:
    """Measure gateways of all sizes with all numbers of clients, and print a table for Tritons and one for workers."""
    scalings = [make_plan(over, options) for over in options.over]
    try:
        with TemporaryDirectory(prefix="nereid-bench-") as folder:
            repository = Path(folder, "models")
            for scaling in scalings:
                write_fixture(scaling.model, repository)
            most = max(point.tritons for scaling in scalings for point in scaling.points)
            with embedded_tritons(repository, scalings[0].model, most) as tritons:
                for scaling in scalings:
                    _measure_all(scaling, tritons, Path(folder), options)
    except KeyboardInterrupt:
        print("stopped; what was complete is above", file=sys.stderr)
        raise
    finally:
        measured = [scaling for scaling in scalings if scaling.points[0].rounds]
        if options.json is not None and measured:
            save_record(options.json, make_record(describe(options), scalings=measured))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("scale", help="throughput over Tritons, workers and clients, and images in a call to Triton")
    command.add_argument("--over", nargs="+", choices=OVER, default=list(OVER), help="what to measure more and more of")
    _add_counts(command, "tritons", [1, 2, 4], f"numbers of Tritons, with {SLOW} and as many workers as the most below")
    _add_counts(command, "workers", [1, 2], f"numbers of worker processes, with {FAST} and one Triton")
    _add_counts(command, "clients", [1, 8, 32, 128], "numbers of concurrent clients")
    add_shared(command, rounds=3, seconds=3.0, images=None, json=None)
    command.set_defaults(run=run)


def make_plan(over: str, options: argparse.Namespace) -> Scaling:
    """Plan a scaling over one of `OVER`. Compared points are adjacent, so that noise affects them equally."""
    workers, clients = sorted(set(options.workers)), sorted(set(options.clients))
    is_over_tritons = over == "tritons"
    sizes = [(each, workers[-1]) for each in sorted(set(options.tritons))] if is_over_tritons else [(1, each) for each in workers]
    return Scaling(
        of="Triton" if is_over_tritons else "worker",
        model=SLOW if is_over_tritons else FAST,
        seconds=options.seconds,
        points=[ScalePoint(tritons=size[0], workers=size[1], clients=each) for each in clients for size in sizes],
    )


def _add_counts(command: argparse.ArgumentParser, name: str, default: list[int], text: str) -> None:
    command.add_argument(f"--{name}", nargs="+", type=count, default=default, metavar="N", help=text)


def _measure_all(scaling: Scaling, tritons: Sequence[Triton], logs: Path, options: argparse.Namespace) -> None:
    """Start and warm up gateways of all sizes, measure all points in several rounds, and print the results."""
    samples = unlabelled_samples(options.images)
    sizes = dict.fromkeys((point.tritons, point.workers) for point in scaling.points)
    try:
        with ExitStack() as stack:
            servers = {size: _start(stack, scaling.model, tritons[: size[0]], size[1], logs) for size in sizes}
            for server in servers.values():
                _measure(server, Load(samples, max(options.clients), max(WARM_UP_SECONDS, options.seconds / 4)))
            for number in range(options.rounds):
                for point in scaling.points:
                    server = servers[point.tritons, point.workers]
                    point.rounds.append(_measure(server, Load(samples, point.clients, options.seconds)))
                    rate = point.rounds[-1].outcome.rate
                    where = f"{scaling.title}: round {number + 1} of {options.rounds}"
                    say(f"{where}, {scaling.size(point)}, {point.load}: {rate:.0f}/s")
    finally:
        say()
        if scaling.points[0].rounds:
            print(f"\n{scaling_text(scaling)}", flush=True)


def _start(stack: ExitStack, model: str, tritons: Sequence[Triton], workers: int, logs: Path) -> Server:
    settings = {f"{PREFIX}{name.upper()}": value for name, value in settings_for(tritons).items()}
    lineup = Lineup(tritons[0], workers, logs, settings=settings)
    contestant = lineup.contestant(_CONTESTANTS[model], model.removesuffix("_file"))
    return Server(contestant, stack.enter_context(lineup.start(contestant)), tritons)


def _measure(server: Server, load: Load) -> Measurement:
    url, model = server.running.url, server.contestant.model
    before = read_batch_sizes(url, model)
    measured = measure(server.contestant, server.running, server.tritons, load)
    measured.calls = dict(read_batch_sizes(url, model) - before)
    return measured
