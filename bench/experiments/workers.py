"""Best number of workers, and of decoding threads per worker, on this machine."""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.experiments.options import Commands, add_clients, add_images, add_rounds, add_seconds
from bench.harness.contest import Load, measure_alone
from bench.harness.lineup import Lineup
from bench.harness.triton import fixture_triton
from bench.load.images import unlabelled_samples
from bench.report.contests import ContestantResult

THREADS = (1, 2, 4)


def run(options: argparse.Namespace) -> int:
    """Measure each combination with the null model and shared memory, in interleaved rounds."""
    cores = len(os.sched_getaffinity(0))
    cases = [(workers, threads) for workers in sorted({1, cores, cores + 1, 2 * cores + 1}) for threads in THREADS]
    entries = {case: ContestantResult(name=str(case), model="null", note="") for case in cases}
    load = Load(unlabelled_samples(options.images), options.clients, options.seconds)
    with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton() as triton:
        for _ in range(options.rounds):
            for workers, threads in cases:
                lineup = Lineup(triton, workers, Path(logs), settings={"NEREID_DECODE_THREADS": str(threads)})
                entries[workers, threads].rounds.append(measure_alone(lineup, "nereid_shm", "null", load))
    print(
        f"{cores} cores, {options.clients} clients, null model, medians of {options.rounds} interleaved rounds"
        f" of {options.seconds:g} s"
    )
    print("workers  threads each    req/s   p99 ms   gateway's CPU, ms per request")
    for (workers, threads), entry in entries.items():
        rate, p99, cpu = (entry.median(figure) for figure in ("requests/s", "p99", "cpu gateway"))
        print(f"{workers:7} {threads:13} {rate:8.0f} {p99:8.0f} {cpu:8.2f}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("workers", help="how many processes and threads are best")
    add_seconds(command, 5.0)
    add_rounds(command, 3)
    add_clients(command)
    add_images(command)
    command.set_defaults(run=run)
