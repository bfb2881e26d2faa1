"""Cases of an experiment: what is started, and which load it gets, in interleaved rounds, so that noise affects all equally."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import psutil

from app.host.program import CommandError
from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant, Contestants
from bench.harness.meters import MIB, Meters, family, find_workers, memory_mib
from bench.harness.processes import Running
from bench.load.driver import Driver, run
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.report.measurements import UNKNOWN_MODEL, Measurement, Run
from bench.report.progress import say

WARM_UP_SECONDS = 1.5
"""Load before the first round; the first requests after a start are slower."""


class Case(NamedTuple):
    """One row of an experiment."""

    name: str
    """In the results."""
    samples: Sequence[Sample]
    clients: int
    model: str = "null"
    """A model in the Triton of the lineup."""
    server: str = ""
    """What is started, a contestant of the lineup; empty if it is the name. Cases with the same server and model share it."""
    path: str = "/detect"
    bases: Sequence[str] = ()
    """Names of the cases whose figures the ratios divide by."""
    is_polite: bool = False
    """Whether clients wait for the time in Retry-After."""
    work: Callable[[float], Measurement] | None = None
    """Measures, for so many seconds, something that is no server; None to load the server."""


def hold(mode: str, cases: Sequence[Case], lineup: Contestants, seconds: float, rounds: int) -> list[Run]:
    """Start and warm up all servers, then measure each case in turn, in several rounds. Servers that do not start are left out.

    Raises:
        ContestantError: A response was wrong before the first round, or a server has ended.
    """
    with ExitStack() as stack:
        servers: dict[tuple[str, str], tuple[Contestant, Running] | None] = {}
        for case in cases:
            if not case.work and (place := _place(case)) not in servers:
                say(f"{mode}: starting {place[0]}")
                servers[place] = _start(place, lineup, stack)
        held = [(case, servers.get(_place(case)), list[Measurement]()) for case in cases]
        held = [entry for entry in held if entry[0].work or entry[1]]
        for case, server, _ in held:
            if server and (wrong := _drive(server[1], case, WARM_UP_SECONDS).statuses.get("wrong")):
                raise ContestantError(f"{case.name} is not measured: {wrong} responses to {case.clients} clients are wrong")
        for number in range(rounds):
            for case, server, measured in held:
                say(f"{mode}: round {number + 1} of {rounds}, {case.name}, {case.clients} clients")
                if case.work:
                    measured.append(case.work(seconds))
                elif server:
                    measured.append(meters_of(lineup, *server).read(_drive(server[1], case, seconds)))
        say()
        return [_to_run(mode, case, server, measured) for case, server, measured in held]


def meters_of(lineup: Contestants, contestant: Contestant, server: Running) -> Meters:
    """Start measuring a contestant and its Triton."""
    triton = lineup.triton if contestant.model else None

    def find() -> dict[str, list[psutil.Process]]:
        return {"gateway": family(server.process), **(triton.processes if triton else {})}

    return Meters(find, triton.address if triton else "", contestant.model)


def _place(case: Case) -> tuple[str, str]:
    return case.server or case.name, case.model


def _start(place: tuple[str, str], lineup: Contestants, stack: ExitStack) -> tuple[Contestant, Running] | None:
    try:
        contestant = lineup.contestant(*place)
        return contestant, stack.enter_context(lineup.start(contestant))
    except (ContestantError, CommandError) as error:
        say()
        print(f"{place[0]} is left out: {error}", file=sys.stderr)
        return None


def _drive(server: Running, case: Case, seconds: float) -> Outcome:
    try:
        return run(Driver(f"{server.url}{case.path}", case.samples, seconds).closed(case.clients, is_polite=case.is_polite))
    except OSError as error:
        raise ContestantError(f"{server.url} does not accept connections any more: {error}") from error


def _to_run(mode: str, case: Case, server: tuple[Contestant, Running] | None, rounds: Sequence[Measurement]) -> Run:
    more, model = dict[str, float](), ""
    if server:
        contestant, process = server
        infos = [worker.memory_full_info() for worker in find_workers(process.process, contestant.workers)]
        more = {"worker MiB": infos[0].rss / MIB, "unshared MiB": infos[0].uss / MIB} if infos else {}
        more |= {"server MiB": memory_mib(family(process.process)), "start s": process.start_seconds}
        model = next((one.outcome.model for one in rounds if one.outcome.model), contestant.model)
    return Run.of_rounds(
        rounds,
        {name: round(value, 1) for name, value in more.items()},
        contestant=case.name,
        mode=mode,
        model=model or UNKNOWN_MODEL,
        clients=case.clients,
        bases=list(case.bases),
    )
