"""Performance of Nereid on this machine, in half a minute: the default experiment."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments.limit import measure_bare, measure_http
from bench.experiments.options import Commands, add_clients, add_images, add_seconds, add_workers
from bench.experiments.progress import say
from bench.experiments.stages import image_files
from bench.harness.contest import Load, measure_alone
from bench.harness.lineup import Lineup
from bench.harness.triton import fixture_triton
from bench.load.images import unlabelled_samples
from bench.report.text import number, table

_NOTE = "a model that answers at once; client and Triton share the cores with the server, the bare loop does not"
_NEXT = """
./just bench quick     load on a running server, with its own model
./just bench versus    side by side with a FastAPI + uvicorn + Pillow stack
./just bench limit     how far each part is from what this machine can do
./just bench --help    all experiments"""


def run(options: argparse.Namespace) -> int:
    """Measure a separate gateway, and decoding and HTTP alone."""
    load = Load(unlabelled_samples(options.images), options.clients, options.seconds / 3)
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        say("a gateway with shared memory")
        nereid = measure_alone(Lineup(triton, options.workers, Path(logs)), "nereid_shm", "null", load)
        say("HTTP alone, and then decoding and letterbox alone")
        http = measure_http(Path(logs), load, options.workers)
    with image_files(options.images) as files:
        bare = measure_bare("nereid_shm", files, options.seconds / 3)
    say()
    outcome = nereid.outcome
    times = [f"{outcome.percentile(percent):.1f} ms" for percent in (50, 99)]
    print(
        table(
            [
                ("", "requests/s", "p50", "p99", "CPU per request"),
                ("Nereid", number(outcome.rate), *times, f"{nereid.figures['cpu gateway']:.2f} ms"),
                ("limit: HTTP alone", number(http.rate), "", "", f"{http.cpu_ms:.2f} ms"),
                ("limit: decode and letterbox", number(bare.rate), "", "", f"{bare.cpu_ms:.2f} ms"),
            ]
        )
    )
    print(_NOTE)
    print(_NEXT)
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("overview", help="what Nereid does on this machine; runs if no name is given")
    add_seconds(command, 30.0)
    add_clients(command)
    add_workers(command)
    add_images(command)
    command.set_defaults(run=run)
