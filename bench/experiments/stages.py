"""CPU time of a request by step: one process per candidate, medians of several interleaved runs."""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from app.settings.schema import Settings
from bench.experiments.candidates.registry import CANDIDATES, NEREID
from bench.experiments.options import Commands, add_shared, count
from bench.harness.environments import REFERENCE
from bench.harness.errors import ContestantError
from bench.harness.lineup import BEFORE
from bench.harness.processes import ROOT, environment_of, require_checkout
from bench.harness.triton import fixture_triton
from bench.load.images import unlabelled_samples
from bench.report.contest_text import spread

IMAGE_STEPS = ("header", "decode", "letterbox")
"""The steps of Nereid's candidates that need no Triton."""

_PROGRAM = "bench.experiments.candidates"
_END_SECONDS = 60


class Spent(msgspec.Struct, frozen=True):
    """Measurement of one process of a candidate."""

    seconds: float
    milliseconds: dict[str, float]
    """CPU time per image, by step."""
    images: int = 0
    """Number of images."""

    @property
    def total(self) -> float:
        """CPU milliseconds per image."""
        return sum(self.milliseconds.values())


def run(options: argparse.Namespace) -> int:
    """Print the steps of every candidate."""
    before = require_checkout(options.before) if options.before else None
    spent: dict[str, list[Spent]] = {}
    left_out: dict[str, str] = {}
    with image_files(options.images) as files, fixture_triton() as triton:
        for _ in range(options.runs):
            for name in turns(has_before=before is not None):
                if name in left_out:
                    continue
                checkout = before if before and name.endswith(BEFORE) else ROOT
                try:
                    found = spend(name, files, options.seconds, triton=triton.settings, checkout=checkout)
                except ContestantError as error:
                    left_out[name] = str(error)
                else:
                    spent.setdefault(name, []).extend(found)
    print(f"CPU milliseconds per image, medians of {options.runs} runs of {options.seconds:g} s, each in a process of its own")
    for line in (*describe(spent), *(f"{name} is left out: {reason}" for name, reason in left_out.items())):
        print(line)
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("stages", help="CPU time of a request by step, Nereid's and others'")
    command.add_argument("--runs", type=count, default=5, help="runs per candidate, interleaved")
    add_shared(command, seconds=2.0, images=None, before=None)
    command.set_defaults(run=run)


def turns(*, has_before: bool) -> list[str]:
    """Return the candidates in the order of one round; each Nereid candidate is followed by its counterpart."""
    return [each for name in CANDIDATES for each in ((name, f"{name}{BEFORE}") if has_before and name in NEREID else (name,))]


def describe(spent: dict[str, list[Spent]]) -> Iterator[str]:
    """Describe each candidate by the medians of its steps, then the ratios to counterparts."""
    width = max(map(len, spent), default=0)
    for name, runs in spent.items():
        steps = {step: median(one.milliseconds[step] for one in runs) for step in runs[0].milliseconds}
        parts = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
        yield f"{name:{width}} {median(one.total for one in runs):6.2f} = {parts}"
    for name, runs in spent.items():
        counterparts = spent.get(f"{name}{BEFORE}", [])
        if counterparts:
            ratios = ", ".join(f"{step} {spread(values)}" for step, values in _ratios(runs, counterparts).items())
            yield f"{name} against {name}{BEFORE}, median of the runs' ratios (min..max): {ratios}"


def _ratios(runs: Sequence[Spent], counterparts: Sequence[Spent]) -> dict[str, list[float]]:
    """Return the ratios by run: of the total, and of every common step."""
    pairs = list(zip(runs, counterparts, strict=False))
    ratios = {"total": [one.total / other.total for one, other in pairs]}
    for step in runs[0].milliseconds:
        ratios[step] = [one.milliseconds[step] / other.milliseconds[step] for one, other in pairs if other.milliseconds.get(step)]
    return {step: values for step, values in ratios.items() if values}


@contextmanager
def image_files(folder: Path | None) -> Iterator[Path]:
    """Write the COCO-sized images to a temporary folder."""
    with TemporaryDirectory(prefix="nereid-bench-") as target:
        for number, sample in enumerate(unlabelled_samples(folder)):
            Path(target, f"{number:04}").write_bytes(sample.body)
        yield Path(target)


def spend(  # noqa: PLR0913 - the parts of a run
    name: str,
    files: Path,
    seconds: float,
    *,
    processes: int = 1,
    steps: Sequence[str] = (),
    triton: Settings | None = None,
    checkout: Path = ROOT,
) -> list[Spent]:
    """Run a candidate in several processes at the same time.

    Args:
        name: Name of the candidate; the name of its counterpart in another checkout ends with `@before`.
        files: A folder of images.
        seconds: Duration of the run.
        processes: Number of processes.
        steps: Steps to run; empty for all.
        triton: Settings of a Triton, for the steps that need one; None to skip those steps.
        checkout: The checkout that contains the candidate's code.

    Raises:
        ContestantError: A process failed; the message is the last line of its output.
    """
    candidate = name.removesuffix(BEFORE)
    python = str(REFERENCE.python()) if candidate == "reference" else sys.executable
    command = [python, "-m", _PROGRAM, candidate, str(files), str(seconds), *steps]
    variables = {} if triton is None else {"BENCH_TRITON": triton.triton_address}
    found = []
    with ExitStack() as stack:
        children = []
        for _ in range(processes):
            child = subprocess.Popen(
                command,
                cwd=checkout,
                env={**environment_of(checkout), "OMP_NUM_THREADS": "1", **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            output, errors = child.communicate(timeout=seconds + _END_SECONDS)
            if child.returncode:
                raise ContestantError((errors.splitlines() or ["it ended without a message"])[-1])
            found.append(msgspec.json.decode(output.splitlines()[-1], type=Spent))
    return found
