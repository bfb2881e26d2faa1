"""CPU time of a request by step, one process per candidate, medians of several runs in turn."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec

from bench import candidates, pictures, processes
from bench.processes import ContestantError

PIXELS = ("header", "decode", "letterbox")
_SHARED = processes.ROOT.parent / "shared" / "images"


class Spent(msgspec.Struct, frozen=True):
    """What one process of a candidate did."""

    pictures: int
    seconds: float
    milliseconds: dict[str, float]
    """CPU time per picture, by step."""

    @property
    def total(self) -> float:
        """CPU milliseconds per picture."""
        return sum(self.milliseconds.values())


def report(runs: int, seconds: float, folder: Path | None) -> int:
    """Print the steps of every candidate."""
    spent: dict[str, list[Spent]] = {}
    with written(folder) as files, processes.triton(with_real=False) as triton:
        for _ in range(runs):
            for name in candidates.CANDIDATES:
                try:
                    spent.setdefault(name, []).extend(together(name, files, seconds, 1, triton=triton.settings.triton_url))
                except ContestantError as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
    print(f"CPU milliseconds per picture, medians of {runs} runs of {seconds:g} s, each in a process of its own")
    for name, several in spent.items():
        if several:
            steps = {step: median(one.milliseconds[step] for one in several) for step in several[0].milliseconds}
            parts = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
            print(f"{name:11} {median(one.total for one in several):6.2f} = {parts}")
    return 0


@contextmanager
def written(folder: Path | None) -> Iterator[Path]:
    """Lay the COCO-sized pictures out as files."""
    with TemporaryDirectory(prefix="nereid-bench-") as target:
        samples = pictures.coco_sized(folder or (_SHARED if _SHARED.is_dir() else None))
        for number, sample in enumerate(samples):
            Path(target, f"{number:04}").write_bytes(sample.body)
        yield Path(target)


def together(  # noqa: PLR0913, PLR0917
    name: str, files: Path, seconds: float, count: int, steps: Sequence[str] = (), triton: str = ""
) -> list[Spent]:
    """Run a candidate in `count` processes at the same time; those of its steps that ask a Triton, if there is one.

    Raises:
        ContestantError: One failed; the message is the last line it printed.
    """
    python = str(processes.reference_python()) if name == "reference" else sys.executable
    command = [python, "-m", "bench.candidates", name, str(files), str(seconds), *steps]
    found = []
    with ExitStack() as stack:
        children = []
        for _ in range(count):
            child = subprocess.Popen(
                command,
                cwd=processes.ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_TRITON": triton},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            output, errors = child.communicate(timeout=seconds + 60)
            if child.returncode:
                raise ContestantError((errors.splitlines() or ["it ended without a word"])[-1])
            found.append(msgspec.json.decode(output.splitlines()[-1], type=Spent))
    return found
