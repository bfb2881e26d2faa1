"""What a cascade costs beside its parts: CPU time of the gateway, and latency with models that only wait, both as ratios."""

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from app.cascade.definition import Cascade, Step
from app.cascade.run import run_cascade
from app.main import open_resources
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from bench.experiments.options import Commands, add_shared
from bench.harness.triton import Triton, embedded_triton
from bench.load.images import Sample, large_sample, unlabelled_samples
from bench.models.repository import write_fixture, write_waiting
from bench.report.text import number, table

CPU_RATIO, WALL_RATIO = 1.15, 1.2
"""The most that a cascade may cost."""

_MODELS = {"objects": (100, 10), "image": (80, 0), "faces": (120, 0), "lines": (150, 10), "vectors": (40, 0), "texts": (60, 0)}
"""For each model the milliseconds that it waits for a batch, and the objects that it finds."""
_CHAINS = (("objects", "vectors"), ("image",), ("faces",), ("lines", "texts"))
"""Steps about the whole image, and those about what they find."""
_DEADLINE_SECONDS = 60.0


def run(options: argparse.Namespace) -> int:
    """Run the cascade, its chains and their first steps in turn; print the medians of the rounds, and their ratios."""
    samples = {"12 MP": large_sample(), "small": unlabelled_samples(None)[0]}
    rows = []
    with _waiting_triton() as triton:
        for name, sample in samples.items():
            cpu, wall = asyncio.run(_measure(triton, sample, options.rounds))
            firsts, chains = [cpu[chain[:1]] for chain in _CHAINS], [cpu[chain] for chain in _CHAINS]
            parts = max(firsts) + sum(chains) - sum(firsts)
            slowest = max(wall[chain] for chain in _CHAINS)
            whole = tuple(_MODELS)
            for what, own, other, most in (("cpu", cpu[whole], parts, CPU_RATIO), ("wall", wall[whole], slowest, WALL_RATIO)):
                rows.append((name, what, number(own), number(other), f"{own / other:.3f}", "yes" if own <= most * other else "NO"))
    print(table([("image", "ms of", "cascade", "part", "ratio", "holds"), *rows]))
    print(
        f"cpu: beside the dearest part and all crops; wall: beside the slowest chain; {len(_CHAINS)} chains, 20 crops,"
        f" medians of {options.rounds} rounds"
    )
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("cascade", help="a cascade beside its parts: CPU time, and latency with models that wait")
    add_shared(command, rounds=15)
    command.set_defaults(run=run)


@contextmanager
def _waiting_triton() -> Iterator[Triton]:
    """Run a Triton with the models."""
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        write_fixture("null", Path(folder))
        for name, (milliseconds, objects) in _MODELS.items():
            write_waiting(name, Path(folder), milliseconds, objects)
        with embedded_triton(Path(folder), "null") as triton:
            yield triton


async def _measure(
    triton: Triton, sample: Sample, rounds: int
) -> tuple[Mapping[tuple[str, ...], float], Mapping[tuple[str, ...], float]]:
    """Return the milliseconds of CPU, and the latency, of cascades by their steps."""
    cascades = dict.fromkeys([tuple(_MODELS), *_CHAINS, *(chain[:1] for chain in _CHAINS)])
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {steps: [] for steps in cascades}
    async with open_resources(triton.settings) as (_, pipeline, metrics):
        for turn in range(rounds + 1):
            for steps, measured in found.items():
                times = await _time(pipeline, metrics, sample, steps)
                if turn:  # the first one prepares the models
                    measured.append(times)
    cpu, wall = ({steps: median(times[kind] for times in measured) for steps, measured in found.items()} for kind in (0, 1))
    return cpu, wall


async def _time(pipeline: Pipeline, metrics: Metrics, sample: Sample, steps: tuple[str, ...]) -> tuple[float, float]:
    """Run a cascade of these steps; return its milliseconds of CPU, and its latency."""
    before = {later: first for first, later in (chain for chain in _CHAINS if len(chain) > 1)}
    cascade = Cascade(name="bench", steps={step: Step(model=step, of=before.get(step)) for step in steps})
    call = CallContext(Deadline.after(_DEADLINE_SECONDS), Timing(), "bench")
    cpu, wall = process_time(), perf_counter()
    answer = await run_cascade(pipeline, cascade, sample.body, call, metrics)
    cpu, wall = process_time() - cpu, perf_counter() - wall
    for step in steps:
        answer.require(step)
    return cpu * 1e3, wall * 1e3
