"""CPU time of an answer from the cache, in memory and in Redis, beside HTTP alone and an inference."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from app.host.processes import die_with_parent, end_group
from app.triton.repository import DESCRIPTION
from bench.experiments.options import Commands, add_shared
from bench.experiments.progress import say
from bench.harness.contest import Load, measure
from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant, Lineup
from bench.harness.ports import find_free
from bench.harness.triton import embedded_triton
from bench.load.images import unlabelled_samples
from bench.models.repository import write_models
from bench.report.measurements import Measurement
from bench.report.text import number, table

FLOOR = "HTTP alone"
IN_MEMORY, IN_REDIS = "hit in memory", "hit in Redis"
OBJECTS = ", ten objects"
"""Suffix of the hits of a model that finds ten objects; the others find none."""
_DESCRIPTION = """\
labels = ["object"]
default_version = 1
last_version = 1
recipe = {task = "detection", size = [640, 640], head = "end_to_end"}
versions = {1 = "of a fixture"}
"""
"""Results of models without a description are not cached."""
_START_SECONDS = 5.0
_POLL_SECONDS = 0.02


def run(options: argparse.Namespace) -> int:
    """Measure all servers in turn; print the medians of the rounds."""
    load = Load(unlabelled_samples(options.images), options.clients, options.seconds)
    found: dict[str, list[Measurement]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nereid-bench-")))
        write_models(folder / "models")
        for name in ("null_file", "objects_file"):
            (folder / "models" / name / DESCRIPTION).write_text(_DESCRIPTION, encoding="utf-8")
        triton = stack.enter_context(embedded_triton(folder / "models", "null"))
        caches = {IN_MEMORY: "memory"}
        if program := shutil.which("redis-server"):
            caches[IN_REDIS] = stack.enter_context(_redis(program, folder))
        contestants = {FLOOR: (Lineup(triton, options.workers, folder), _floor(options.workers))}
        for name, cache in caches.items():
            settings = {"NEREID_CACHE": cache, "NEREID_MODEL_REPOSITORY": str(triton.repository)}
            lineup = Lineup(triton, options.workers, folder, settings=settings)
            contestants[name] = lineup, lineup.contestant("nereid_file", "null")
            contestants[f"{name}{OBJECTS}"] = lineup, lineup.contestant("nereid_file", "objects")
        lineup, _ = contestants[FLOOR]
        for name in ("nereid_shm", "nereid_file"):
            contestants[f"inference, {name}"] = lineup, lineup.contestant(name, "null")
        servers = {name: (own, stack.enter_context(lineup.start(own))) for name, (lineup, own) in contestants.items()}
        for number_ in range(options.rounds + 1):  # the first one fills the caches
            for name, server in servers.items():
                say(f"round {number_} of {options.rounds}, {name}")
                measurement = measure(*server, [triton], load)
                if measurement.outcome.failed:
                    raise ContestantError(f"not all requests were answered: {name}, {measurement.outcome.statuses}")
                if number_:
                    found.setdefault(name, []).append(measurement)
    say()
    print(describe(found))
    print(f"CPU of all processes of the gateway, ms per request; {options.workers} workers, {options.clients} clients;")
    print(f"medians of {options.rounds} interleaved rounds of {options.seconds:g} s, in brackets the smallest and the largest")
    if IN_REDIS not in caches:
        print("Redis is left out: redis-server is not installed; on Debian: apt-get install redis-server")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("cache", help="what an answer from the cache costs, beside HTTP alone and an inference")
    add_shared(command, rounds=5, seconds=3.0, clients=8, workers=1, images=None)
    command.set_defaults(run=run)


def describe(found: dict[str, list[Measurement]]) -> str:
    """Format a table of servers: their CPU time, and how much more it is than that of HTTP alone in the same round."""
    floor = [one.cpu_ms["gateway"] for one in found[FLOOR]]
    rows = [("answer", "requests/s", "p50 ms", "CPU", "above HTTP alone", "inferences per request")]
    for name, rounds in found.items():
        cpu = [one.cpu_ms["gateway"] for one in rounds]
        inferences = [one.triton.inferences / one.outcome.requests for one in rounds if one.triton]
        above = [own - least for own, least in zip(cpu, floor, strict=True)]
        rate, p50 = (median(one.figures[figure] for one in rounds) for figure in ("requests/s", "p50"))
        share = f"{median(inferences):.3f}" if inferences else "-"
        rows.append((name, number(rate), number(p50), _spread(cpu), _spread(above) if name != FLOOR else "-", share))
    return table(rows)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def _floor(workers: int) -> Contestant:
    (port,) = find_free(1)
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), str(workers)]
    return Contestant(
        name=FLOOR, command=command, environment={}, port=port, probe="/", model="", uses_triton=False, workers=workers
    )


@contextmanager
def _redis(program: str, folder: Path) -> Iterator[str]:
    """Run a Redis that keeps nothing on disk until the block ends; return its URL.

    Raises:
        ContestantError: It does not start.
    """
    path = folder / "redis.sock"
    child = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""],
        stdout=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
    )
    try:
        until = time.monotonic() + _START_SECONDS
        while not path.exists():
            if child.poll() is not None or time.monotonic() > until:
                raise ContestantError("redis-server does not start")
            time.sleep(_POLL_SECONDS)
        yield f"unix://{path}"
    finally:
        end_group(child, _START_SECONDS)
