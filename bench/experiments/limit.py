"""Nereid's cost relative to the limits of this machine."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from app.settings.schema import Settings
from bench.experiments.options import Commands, add_shared
from bench.experiments.progress import say
from bench.experiments.stages import IMAGE_STEPS, Spent, image_files, spend
from bench.harness.contest import Load, measure_alone
from bench.harness.errors import ContestantError
from bench.harness.lineup import NEREID, Lineup
from bench.harness.meters import Meters, family
from bench.harness.minimal_server import minimal_server
from bench.harness.triton import embedded_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import unlabelled_samples
from bench.load.open_loop import drive_open_loop
from bench.models.repository import write_fixture
from bench.report.measurements import Measurement

CLIENTS, WORKERS = 32, 2
SERVERS = ("nereid_shm", "nereid_file")

_WARM_UP_SECONDS = 1


class Cost(NamedTuple):
    """Throughput and CPU time."""

    rate: float
    """Operations per second."""
    cpu_ms: float
    """CPU time per operation, in milliseconds."""


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    show_limits(options.images, options.seconds, options.clients, options.workers, options.only)
    return 0


def show_limits(
    images: Path | None, seconds: float, clients: int = CLIENTS, workers: int = WORKERS, only: Sequence[str] = SERVERS
) -> dict[str, Measurement]:
    """Measure decoding and letterbox without a server, Nereid with the null model, and the minimal HTTP server; print all.

    Returns:
        The measurements of Nereid, by the name of the contestant.
    """
    load = Load(unlabelled_samples(images), clients, seconds)
    served, paced = {}, {}
    say("decoding and letterbox alone")
    with image_files(images) as files:
        fresh = measure_bare("nereid", files, seconds)
        reused = measure_bare("nereid_shm", files, seconds)
    with TemporaryDirectory(prefix="nereid-bench-") as logs:
        say("HTTP alone")
        http = measure_http(Path(logs), load, workers)
        repository = Path(logs, "models")
        for model in ("null", "null_file"):
            write_fixture(model, repository)
        with embedded_triton(repository, "null") as triton:
            forwarded = measure_http(Path(logs), load, workers, triton.settings)
            lineup = Lineup(triton, workers, Path(logs))
            for name in only:
                say(name)
                try:
                    served[name] = measure_alone(lineup, name, "null", load)
                except ContestantError as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
        for name, one in served.items():
            say(f"HTTP alone at the rate of {name}")
            paced[name] = measure_http(Path(logs), load, workers, rate=one.outcome.rate)
    say()
    print(f"{len(os.sched_getaffinity(0))} cores; the client and Triton have to share them with the server, the bare loops do not")
    print(f"decode and letterbox alone    {reused.rate:7.0f} images/s, {reused.cpu_ms:.2f} ms CPU each (onto a reused canvas)")
    print(f"  onto a new canvas each time {fresh.rate:7.0f} images/s, {fresh.cpu_ms:.2f} ms CPU each")
    print(f"HTTP alone, bodies read       {http.rate:7.0f} requests/s, {http.cpu_ms:.2f} ms CPU each, {clients} clients")
    print(f"  and forwarded to Triton     {forwarded.rate:7.0f} requests/s, {forwarded.cpu_ms:.2f} ms CPU each")
    for name, cost in paced.items():
        print(f"  at the rate of {name:12} {cost.rate:7.0f} requests/s, {cost.cpu_ms:.2f} ms CPU each")
    for name, one in served.items():
        limit, what = (forwarded, "HTTP and Triton") if name == "nereid_file" else (reused, "decode and letterbox")
        rate, cpu = one.outcome.rate, one.cpu_ms["gateway"]
        latencies = ", ".join(f"p{percent} {one.outcome.percentile(percent):.1f} ms" for percent in (50, 99))
        throughput = f"{rate:7.0f} requests/s = {rate / limit.rate:.0%} of {what} alone"
        print(f"{name:29} {throughput}; {cpu:.2f} ms CPU = {cpu / limit.cpu_ms:.2f} x; {latencies}")
    return served


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser(
        "limit", help="what Nereid does here with a model that does nothing, and the limits of this machine"
    )
    command.add_argument("--only", nargs="+", choices=NEREID, default=list(SERVERS), help="servers to measure")
    add_shared(command, seconds=4.0, clients=CLIENTS, workers=WORKERS, images=None)
    command.set_defaults(run=run)


def measure_http(logs: Path, load: Load, workers: int, triton: Settings | None = None, *, rate: float | None = None) -> Cost:
    """Measure the minimal server; with a Triton, it forwards each body.

    With a rate, that many requests per second are sent: as many as the server can answer arrive together more often, so that one
    wake-up of a process serves several.
    """
    with minimal_server(logs, workers, triton) as server:
        url = f"{server.url}/detect"
        drive(drive_closed_loop(url, load.samples, clients=load.clients, seconds=_WARM_UP_SECONDS))
        meters = Meters(lambda: {"gateway": family(server.process)}, [], "")
        if rate is None:
            loop = drive_closed_loop(url, load.samples, clients=load.clients, seconds=load.seconds)
        else:
            loop = drive_open_loop(url, load.samples, rate=rate, seconds=load.seconds, connections=load.clients)
        measured = meters.read(drive(loop))
    return Cost(measured.outcome.rate, measured.cpu_ms["gateway"])


def measure_bare(candidate: str, files: Path, seconds: float) -> Cost:
    """Run decode and letterbox of a candidate of `stages` on all cores."""
    cores = len(os.sched_getaffinity(0))
    spent: list[Spent] = spend(candidate, files, seconds, processes=cores, steps=IMAGE_STEPS)
    return Cost(sum(one.images / one.seconds for one in spent), sum(one.total for one in spent) / cores)
