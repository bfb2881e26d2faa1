"""Contests: several servers under the same load, in interleaved rounds, so that noise affects all of them equally."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import psutil

from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant, Lineup, comparisons
from bench.harness.meters import MIB, Meters, family, worker_memory
from bench.harness.processes import Running
from bench.harness.triton import Triton, triton_processes
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.report.contests import Contest, ContestantResult
from bench.report.measurements import UNKNOWN_MODEL, Measurement

WARM_UP_SECONDS = 1.5
"""Minimum warm-up of a server before it is measured."""


class Load(msgspec.Struct, frozen=True):
    """The load on each contestant."""

    samples: Sequence[Sample]
    clients: int
    seconds: float
    """Duration of each round."""
    path: str = "/detect"


def hold_contest(  # noqa: PLR0913, PLR0917 - the parts of a contest
    title: str,
    contestants: Sequence[tuple[str, str]],
    lineup: Lineup,
    load: Load,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Contest:
    """Start and warm up all contestants, then measure each in turn, in several rounds.

    Args:
        title: Title of the contest.
        contestants: Name and model of each.
        lineup: Starts them. Contestants that do not start are omitted.
        load: The load on each contestant.
        rounds: Number of rounds.
        progress: Called with a message after each round.

    Raises:
        ContestantError: A server that has started does not listen any more.
    """
    contest = Contest(title=title, clients=load.clients, workers=lineup.workers, seconds=load.seconds, entries=[])
    with ExitStack() as stack:
        servers: list[tuple[Contestant, Running]] = []
        for name, model in contestants:
            try:
                contestant = lineup.contestant(name, model)
                servers.append((contestant, stack.enter_context(lineup.start(contestant))))
            except ContestantError as error:
                contest.left_out[name] = str(error)
                progress(f"{name} is left out: {error}")
                continue
            contest.entries.append(ContestantResult(name=name, model=contestant.model))
        for _, server in servers:
            _drive(server, load, max(WARM_UP_SECONDS, load.seconds / 4))
        for number in range(rounds):
            for entry, (contestant, server) in zip(contest.entries, servers, strict=True):
                entry.rounds.append(measure(contestant, server, [lineup.triton], load))
                progress(f"{title}: round {number + 1} of {rounds}, {entry.name}: {entry.rounds[-1].outcome.rate:.0f}/s")
        for entry, (contestant, server) in zip(contest.entries, servers, strict=True):
            memory = worker_memory(server.process, contestant.workers)
            entry.resident_mib = [worker.resident / MIB for worker in memory]
            entry.unshared_mib = [worker.unshared / MIB for worker in memory]
            entry.model = next((one.outcome.model for one in entry.rounds if one.outcome.model), contestant.model) or UNKNOWN_MODEL
    contest.comparisons = comparisons([entry.name for entry in contest.entries])
    return contest


def measure_alone(lineup: Lineup, name: str, model: str, load: Load) -> Measurement:
    """Start, warm up and measure one contestant.

    Args:
        lineup: Starts it.
        name: Name of the contestant.
        model: Name of a model in `bench/models`.
        load: The load.

    Raises:
        ContestantError: It cannot take part.
    """
    contestant = lineup.contestant(name, model)
    with lineup.start(contestant) as server:
        _drive(server, load, WARM_UP_SECONDS)
        return measure(contestant, server, [lineup.triton], load)


def measure(contestant: Contestant, server: Running, tritons: Sequence[Triton], load: Load) -> Measurement:
    """Measure one contestant for one round.

    Raises:
        ContestantError: It does not listen any more.
    """

    def find() -> dict[str, list[psutil.Process]]:
        return {"gateway": family(server.process), **triton_processes(tritons)}

    meters = Meters(find, [triton.address for triton in tritons], contestant.model if contestant.uses_triton else "")
    return meters.read(_drive(server, load, load.seconds))


def _drive(server: Running, load: Load, seconds: float) -> Outcome:
    try:
        return run(drive_closed_loop(f"{server.url}{load.path}", load.samples, clients=load.clients, seconds=seconds))
    except OSError as error:
        raise ContestantError(f"{server.url} does not accept connections any more: {error}") from error
