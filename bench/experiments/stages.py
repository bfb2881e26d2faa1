"""CPU time from an encoded image to a canvas by step: one process per candidate, medians of several interleaved runs."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.experiments.candidates import CANDIDATES, time_steps
from bench.experiments.options import Commands, add_shared
from bench.harness.processes import processes
from bench.load.images import unlabelled_samples
from bench.report.progress import say
from bench.report.text import spread

IMAGE_STEPS = ("header", "decode", "letterbox")
"""The steps that all candidates have, in one or another."""

_BASE = "nereid_shm"


class Spent(NamedTuple):
    """Measurement of one process of a candidate."""

    images: int
    seconds: float
    milliseconds: dict[str, float]
    """CPU time per image, by step."""

    @property
    def total(self) -> float:
        """CPU milliseconds per image."""
        return sum(self.milliseconds.values())

    @property
    def imaging(self) -> float:
        """CPU milliseconds per image from file to canvas."""
        return sum(self.milliseconds.get(step, 0.0) for step in IMAGE_STEPS)


def run(options: argparse.Namespace) -> int:
    """Print the steps of every candidate."""
    spent: dict[str, list[Spent]] = {name: [] for name in CANDIDATES}
    with image_files() as files:
        for number in range(options.rounds):
            for name in CANDIDATES:
                say(f"round {number + 1} of {options.rounds}, {name}")
                spent[name] += spend(name, files, options.seconds)
    say()
    print(f"CPU milliseconds per image, medians of {options.rounds} runs of {options.seconds:g} s, each in a process of its own")
    print("\n".join(describe(spent)))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("stages", help="CPU time of decoding, fitting and encoding by step, beside other libraries")
    add_shared(command, seconds=2.0, rounds=5)
    command.set_defaults(run=run)


def describe(spent: Mapping[str, Sequence[Spent]]) -> Iterator[str]:
    """Describe each candidate by the medians of its steps, then by the ratio of its imaging to Nereid's."""
    width = max(map(len, spent), default=0)
    for name, runs in spent.items():
        steps = {step: median(one.milliseconds[step] for one in runs) for step in runs[0].milliseconds}
        parts = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
        yield f"{name:{width}} {median(one.total for one in runs):6.2f} = {parts}"
    yield f"{', '.join(IMAGE_STEPS)}, relative to {_BASE}, median of the runs' ratios (min..max):"
    for name, runs in spent.items():
        if name != _BASE:
            yield f"  {name} {spread([one.imaging / base.imaging for one, base in zip(runs, spent[_BASE], strict=True)])}"


@contextmanager
def image_files() -> Iterator[Path]:
    """Write the COCO-sized images to a temporary folder."""
    with TemporaryDirectory(prefix="nereid-bench-") as target:
        for number, sample in enumerate(unlabelled_samples()):
            Path(target, f"{number:04}").write_bytes(sample.body)
        yield Path(target)


def spend(name: str, files: Path, seconds: float, *, count: int = 1, steps: Sequence[str] = ()) -> list[Spent]:
    """Run steps of a candidate, or all, on a folder of images, in `count` new processes at the same time."""
    with processes(count) as pool:
        running = [pool.submit(time_steps, name, files, seconds, tuple(steps)) for _ in range(count)]
        return [Spent(*one.result()) for one in running]
