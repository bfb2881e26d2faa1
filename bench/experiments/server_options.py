"""Effect of common server options on Nereid: processes, clients, kept connections, renewed workers."""

import argparse
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.experiments.options import Commands, add_clients, add_images, add_rounds, add_seconds
from bench.harness.contest import Load, measure_alone
from bench.harness.lineup import Lineup
from bench.harness.processes import Running
from bench.harness.triton import fixture_triton
from bench.load.images import unlabelled_samples
from bench.report.contest_text import spread
from bench.report.contests import ContestantResult

_MANY_CLIENTS = 512
_MODEL = "null"
_CONTESTANT = "nereid_file"
"""It passes the file through, so that HTTP dominates its cost."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of the server and its clients."""

    title: str
    workers: int
    clients: int
    keep_alive: bool = True
    is_renewed: bool = False
    """Whether all workers are renewed one by one during the measurement."""


def run(options: argparse.Namespace) -> int:
    """Measure each case in interleaved rounds, and compare it with the first."""
    cores = len(os.sched_getaffinity(0))
    cases = make_cases(cores, options.clients)
    entries = [ContestantResult(name=case.title, model=_MODEL, note="") for case in cases]
    samples = unlabelled_samples(options.images)
    with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton() as triton:
        for _ in range(options.rounds):
            for case, entry in zip(cases, entries, strict=True):
                load = Load(samples, case.clients, options.seconds, case.keep_alive)
                lineup = Lineup(triton, case.workers, Path(logs))
                disturb = _renew if case.is_renewed else lambda _: None
                entry.rounds.append(measure_alone(lineup, _CONTESTANT, _MODEL, load, disturb))
    print(
        f"{cores} cores, null model, files passed through, medians of {options.rounds} interleaved rounds of {options.seconds:g} s"
    )
    print(f"{'':48}  req/s   p50 ms   p99 ms   rejected   lost   throughput, to the first")
    for entry in entries:
        rate, p50, p99 = (entry.median(figure) for figure in ("requests/s", "p50", "p99"))
        rejected = sum(one.outcome.statuses.get("429", 0) for one in entry.rounds)
        lost = sum(one.outcome.requests - one.outcome.correct for one in entry.rounds) - rejected
        ratio = spread(entry.ratios(entries[0], "requests/s"))
        print(f"{entry.name:48} {rate:6.0f} {p50:8.1f} {p99:8.1f} {rejected:10} {lost:6}   {ratio}")
    return 0


def make_cases(cores: int, clients: int) -> list[Case]:
    """Return the cases for a machine, starting with the default settings."""
    usual = Case(title=f"{cores} workers, {clients} clients", workers=cores, clients=clients)
    change = msgspec.structs.replace
    return [
        usual,
        change(usual, title=f"{2 * cores + 1} workers", workers=2 * cores + 1),
        change(usual, title=f"{_MANY_CLIENTS} clients", clients=_MANY_CLIENTS),
        change(usual, title="a connection for each request", keep_alive=False),
        change(usual, title="all workers renewed meanwhile", is_renewed=True),
    ]


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("options", help="what the options that one tunes on other servers do here")
    add_seconds(command, 16.0)
    add_rounds(command, 3)
    add_clients(command)
    add_images(command)
    command.set_defaults(run=run)


def _renew(server: Running) -> None:
    os.kill(server.process.pid, signal.SIGHUP)
