"""A flame graph of one worker under load, recorded by py-spy."""

import argparse
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments.options import Commands, add_shared, count
from bench.harness.errors import ContestantError
from bench.harness.lineup import NAMES, Lineup
from bench.harness.meters import busiest
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import unlabelled_samples

_SAMPLES_PER_SECOND = 200
_WARM_UP_SECONDS = 2
_WRITE_SECONDS = 60


def run(options: argparse.Namespace) -> int:
    """Write a flame graph of the busiest worker of a contestant of `versus`."""
    program = shutil.which("py-spy")
    if program is None:
        raise ContestantError("py-spy is not installed; run: ./just")
    samples = unlabelled_samples()
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        lineup = Lineup(triton, options.workers, Path(logs))
        with lineup.start(lineup.contestant(options.name, "null")) as server:
            url = f"{server.url}/detect"
            drive(drive_closed_loop(url, samples, clients=options.clients, seconds=_WARM_UP_SECONDS))
            command = [program, "record", "--nonblocking", "--duration", str(options.seconds), "--rate", str(_SAMPLES_PER_SECOND)]
            recorder = subprocess.Popen([*command, "--output", str(options.out.resolve()), "--pid", str(busiest(server.process))])
            try:
                outcome = drive(drive_closed_loop(url, samples, clients=options.clients, seconds=options.seconds + 1))
                code = recorder.wait(_WRITE_SECONDS)
            finally:
                recorder.kill()
    if code:
        raise ContestantError("py-spy failed; the reason is above. Without root it needs kernel.yama.ptrace_scope = 0")
    print(f"{options.out}: one of {options.workers} workers of {options.name}, {outcome.rate:.0f} requests/s during the recording")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("profile", help="a flame graph of a worker under load, by py-spy")
    command.add_argument("seconds", type=count, nargs="?", default=60, help="seconds to record")
    command.add_argument("out", type=Path, nargs="?", default=Path("profile.svg"), help="SVG file to write")
    command.add_argument("--name", choices=NAMES, default="nereid_shm", help="contestant of `versus` to watch")
    add_shared(command, clients=32, workers=2)
    command.set_defaults(run=run)
