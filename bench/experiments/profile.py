"""A flame graph of one worker, recorded by py-spy: of a contestant under load, or of a service that runs."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.telemetry.metrics import REQUEST_BOUNDS
from bench.experiments import slow_requests
from bench.experiments.options import Commands, add_shared, count
from bench.harness.errors import ContestantError
from bench.harness.lineup import NAMES, Lineup
from bench.harness.meters import busiest
from bench.harness.py_spy import recording
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import unlabelled_samples

_WARM_UP_SECONDS = 2


def run(options: argparse.Namespace) -> int:
    """Write a flame graph of the busiest worker of a running service, or else of a contestant of `versus`."""
    if options.pid or options.url:
        try:
            print(slow_requests.record(options.pid, options.url, options.key_file, options.slow, options.seconds, options.out))
        except (OSError, ValueError, httpx.InvalidURL) as error:
            raise ContestantError(str(error)) from error
        return 0
    samples = unlabelled_samples()
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        lineup = Lineup(triton, options.workers, Path(logs))
        with lineup.start(lineup.contestant(options.name, "null")) as server:
            url = f"{server.url}/detect"
            drive(drive_closed_loop(url, samples, clients=options.clients, seconds=_WARM_UP_SECONDS))
            with recording(busiest(server.process), options.seconds, options.out):
                outcome = drive(drive_closed_loop(url, samples, clients=options.clients, seconds=options.seconds + 1))
    print(f"{options.out}: one of {options.workers} workers of {options.name}, {outcome.rate:.0f} requests/s during the recording")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("profile", help="a flame graph of a worker under load, or while its requests are slow, by py-spy")
    command.add_argument("seconds", type=count, nargs="?", default=60, help="seconds to record, or to wait for slow requests")
    command.add_argument("out", type=Path, nargs="?", default=Path("profile.svg"), help="SVG file to write")
    command.add_argument("--name", choices=NAMES, default="nereid_shm", help="contestant of `versus` to load and to watch")
    add_shared(command, clients=32, workers=2)
    live = command.add_argument_group("a service that runs on this machine; no load is sent")
    live.add_argument("--url", help="URL at which it listens, or unix:PATH; with --pid, only that of its metrics")
    live.add_argument("--pid", type=count, help="its process, or one of its workers")
    live.add_argument("--key-file", type=Path, help="file with an API key that has the scope health")
    bounds = [round(bound * 1e3) for bound in REQUEST_BOUNDS]
    live.add_argument("--slow", type=int, choices=bounds, default=1000, help="milliseconds above which a request is slow")
    command.set_defaults(run=run)
