"""Contests: several servers under the same load, in interleaved rounds, so that noise hits all of them alike."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import psutil

from bench.harness.entrants import Entrant, Lineup, comparisons
from bench.harness.errors import ContestantError
from bench.harness.meters import MIB, Meters, children, family, worker_memory
from bench.harness.processes import Running
from bench.harness.triton import Triton
from bench.load.closed import drive_closed
from bench.load.driver import run
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.report.records import UNKNOWN_MODEL, Contest, Entry, Measurement

WARM_UP_SECONDS = 1.5
"""The shortest warm-up of a server before it is measured."""


class Load(msgspec.Struct, frozen=True):
    """What all entrants of a contest are asked."""

    samples: Sequence[Sample]
    clients: int
    seconds: float
    """Of each round."""


def hold_contest(  # noqa: PLR0913, PLR0917 - what a contest consists of
    title: str,
    entrants: Sequence[tuple[str, str]],
    lineup: Lineup,
    load: Load,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Contest:
    """Start and warm up all entrants, then measure round after round of each in turn.

    Args:
        title: What the contest is about.
        entrants: Name and model of each.
        lineup: Starts them. Those that do not start are left out.
        load: What they are asked.
        rounds: How many.
        progress: Called with a message after each round.

    Raises:
        ContestantError: A server that has started does not listen any more.
    """
    contest = Contest(title=title, clients=load.clients, workers=lineup.workers, seconds=load.seconds, entries=[])
    with ExitStack() as stack:
        servers: list[tuple[Entrant, Running]] = []
        for name, model in entrants:
            try:
                entrant = lineup.entrant(name, model)
                servers.append((entrant, stack.enter_context(lineup.start(entrant))))
            except ContestantError as error:
                contest.left_out[name] = str(error)
                progress(f"{name} is left out: {error}")
                continue
            contest.entries.append(Entry(name=name, model=entrant.model, note=entrant.note))
        for _, server in servers:
            _ask(server, load, max(WARM_UP_SECONDS, load.seconds / 4))
        for number in range(rounds):
            for entry, (entrant, server) in zip(contest.entries, servers, strict=True):
                entry.rounds.append(measure(entrant, server, lineup.triton, load))
                progress(f"{title}: round {number + 1} of {rounds}, {entry.name}: {entry.rounds[-1].outcome.rate:.0f}/s")
        for entry, (entrant, server) in zip(contest.entries, servers, strict=True):
            memory = worker_memory(server.process, entrant.workers)
            entry.resident_mib = [worker.resident / MIB for worker in memory]
            entry.unshared_mib = [worker.unshared / MIB for worker in memory]
            entry.model = next((one.outcome.model for one in entry.rounds if one.outcome.model), entrant.model) or UNKNOWN_MODEL
    contest.comparisons = comparisons([entry.name for entry in contest.entries])
    return contest


def measure_alone(lineup: Lineup, name: str, model: str, load: Load) -> Measurement:
    """Start, warm up and measure one entrant.

    Raises:
        ContestantError: It cannot take part.
    """
    entrant = lineup.entrant(name, model)
    with lineup.start(entrant) as server:
        _ask(server, load, WARM_UP_SECONDS)
        return measure(entrant, server, lineup.triton, load)


def measure(entrant: Entrant, server: Running, triton: Triton, load: Load) -> Measurement:
    """Measure one entrant for one round.

    Raises:
        ContestantError: It does not listen any more.
    """

    def find() -> dict[str, list[psutil.Process]]:
        return {"gateway": family(server.process), "triton": [triton.process], "stubs": children(triton.process)}

    meters = Meters(find, triton.url, entrant.model if entrant.asks_triton else "")
    return meters.read(_ask(server, load, load.seconds))


def _ask(server: Running, load: Load, seconds: float) -> Outcome:
    try:
        return run(drive_closed(f"{server.url}/detect", load.samples, clients=load.clients, seconds=seconds))
    except OSError as error:
        raise ContestantError(f"{server.url} does not accept connections any more: {error}") from error
