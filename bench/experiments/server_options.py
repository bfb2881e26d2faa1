"""Effect of server options on Nereid: processes, threads, clients, kept connections, renewed workers."""

import argparse
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.experiments.options import Commands, add_shared
from bench.harness.contest import Load, measure_alone
from bench.harness.lineup import Lineup
from bench.harness.processes import Running
from bench.harness.triton import fixture_triton
from bench.load.images import unlabelled_samples
from bench.report.contest_text import spread
from bench.report.contests import ContestantResult
from bench.report.text import number, table

_MANY_CLIENTS = 512
_MODEL = "null"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of the server and its clients."""

    title: str
    workers: int
    clients: int
    threads: int | None = None
    """Decoding threads per worker. Without them, files are passed through, so that HTTP dominates the cost."""
    keep_alive: bool = True
    is_renewed: bool = False
    """Whether all workers are renewed one by one during the measurement."""


def usual_options(cores: int, clients: int) -> list[Case]:
    """Return the cases for the options of other servers, starting with the default settings."""
    usual = Case(title=f"{cores} workers, {clients} clients", workers=cores, clients=clients)
    change = msgspec.structs.replace
    return [
        usual,
        change(usual, title=f"{2 * cores + 1} workers", workers=2 * cores + 1),
        change(usual, title=f"{_MANY_CLIENTS} clients", clients=_MANY_CLIENTS),
        change(usual, title="a connection for each request", keep_alive=False),
        change(usual, title="all workers renewed meanwhile", is_renewed=True),
    ]


def workers_and_threads(cores: int, clients: int) -> list[Case]:
    """Return the cases for processes and decoding threads, starting with the default settings."""
    counts = [(cores, 2), *product(sorted({1, cores, cores + 1, 2 * cores + 1}), (1, 2, 4))]
    return [
        Case(title=f"{workers} workers, {threads} threads each", workers=workers, clients=clients, threads=threads)
        for workers, threads in dict.fromkeys(counts)
    ]


def run(make_cases: Callable[[int, int], list[Case]], options: argparse.Namespace) -> int:
    """Measure each case in interleaved rounds, and compare it with the first."""
    cores = len(os.sched_getaffinity(0))
    cases = make_cases(cores, options.clients)
    entries = [ContestantResult(name=case.title, model=_MODEL) for case in cases]
    samples = unlabelled_samples(options.images)
    with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton() as triton:
        for _ in range(options.rounds):
            for case, entry in zip(cases, entries, strict=True):
                load = Load(samples, case.clients, options.seconds, case.keep_alive)
                settings = {} if case.threads is None else {"NEREID_DECODE_THREADS": str(case.threads)}
                lineup = Lineup(triton, case.workers, Path(logs), settings=settings)
                name = "nereid_file" if case.threads is None else "nereid_shm"
                disturb = _renew if case.is_renewed else lambda _: None
                entry.rounds.append(measure_alone(lineup, name, _MODEL, load, disturb))
    rows = [["", "req/s", "p50 ms", "p99 ms", "CPU ms", "rejected", "lost", "throughput, to the first"]]
    for entry in entries:
        figures = (number(entry.median(figure)) for figure in ("requests/s", "p50", "p99", "cpu gateway"))
        rejected = sum(one.outcome.statuses.get("429", 0) for one in entry.rounds)
        lost = sum(one.outcome.requests - one.outcome.correct for one in entry.rounds) - rejected
        rows.append([entry.name, *figures, str(rejected), str(lost), spread(entry.ratios(entries[0], "requests/s"))])
    print(table(rows))
    print(f"{cores} cores, null model, medians of {options.rounds} interleaved rounds of {options.seconds:g} s")
    return 0


def add_to(commands: Commands) -> None:
    """Add these experiments to the command line."""
    command = commands.add_parser("options", help="what the options that one tunes on other servers do here")
    add_shared(command, seconds=16.0, rounds=3, clients=32, images=None)
    command.set_defaults(run=partial(run, usual_options))
    command = commands.add_parser("workers", help="how many processes and threads are best")
    add_shared(command, seconds=5.0, rounds=3, clients=32, images=None)
    command.set_defaults(run=partial(run, workers_and_threads))


def _renew(server: Running) -> None:
    os.kill(server.process.pid, signal.SIGHUP)
