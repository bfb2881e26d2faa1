"""Loads on a running server, here or on another host: quick, full, sustained, sweep, open."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import psutil

from app import feature
from bench.experiments.options import Commands, add_shared, count, describe, positive
from bench.experiments.service import WARM_UP_REQUESTS, Plan, add_service, check_warm_up, one_line, reach, with_route
from bench.harness.meters import Meters, children, listeners
from bench.load.driver import OPEN_CONNECTIONS, Driver, run
from bench.load.images import Sample, given_samples
from bench.load.outcome import Outcome
from bench.report.measurements import UNKNOWN_MODEL, Run
from bench.report.progress import say, watch
from bench.report.records import describe_machine, make_record, save_record
from bench.report.text import overview, places, sheet

QUICK_CLIENTS, QUICK_SECONDS = 16, 30.0
WARM_UP_CLIENTS, WARM_UP_SECONDS = 4, 1.0
"""Load before the first measurement: the first requests after a start are slower."""
SWEEP = (1, 10, 50, 100, 256)
"""Numbers of clients that `sweep` measures."""
MAX_CLIENTS = 256
"""Maximum number of clients in `sustained`."""
MAX_TRIES = 13
"""Maximum number of runs in `sustained`: doubled from 1 to 256, and two refinements of two."""
WORTH = 0.02
"""Relative gain in throughput for which `sustained` prefers more clients."""

_MAX_FALLS = 2
_REFINEMENTS = 2


class Session:
    """A server, the requests to it, and the runs so far."""

    def __init__(self, options: argparse.Namespace, samples: Sequence[Sample] = ()) -> None:
        """Prepare the session without sending requests; by default, of the images in the options. Errors as for `reach`."""
        self.options = options
        self.runs: list[Run] = []
        self._model: str = options.model or ""
        self._samples = samples or given_samples(options.image)
        self._url = with_route(options.url, f"predict/{options.model}" if options.model else "detect")
        self._service = reach(options, self._url, _plan(options))
        self.is_elsewhere = self._service.is_elsewhere
        self.is_polite = self.is_elsewhere
        """Whether clients wait as long as Retry-After says."""
        is_unknown = self.is_elsewhere and not options.triton
        self._triton: str = "" if is_unknown else options.triton or feature.read_settings().triton_address

    def measure(self, *, clients: int | None = None, rate: float | None = None) -> Run:
        """Load the server with clients that wait for responses, or at a constant rate, independent of its speed."""
        if not self.runs:
            warm_up = min(clients or WARM_UP_CLIENTS, WARM_UP_CLIENTS)
            requests = WARM_UP_REQUESTS if self.is_elsewhere else None
            outcome = self._drive(requests, WARM_UP_SECONDS, clients=warm_up)
            check_warm_up(self._url, outcome)
            print(places(describe_machine(), self._service.server))
            self._model = outcome.model or self._model
        meters = Meters(self._find_processes, self._triton, self._model)
        measured = meters.read(self._drive(self._service.requests, self.options.duration, clients=clients, rate=rate))
        say()
        self._model = measured.outcome.model or self._model
        measured.triton_note = measured.triton_note or ("" if measured.triton else self._missing())
        about = {"contestant": "nereid", "mode": self.options.name, "model": self._model or UNKNOWN_MODEL}
        self.runs.append(Run.of(measured, **about, clients=clients, rate=rate))
        return self.runs[-1]

    def finish(self, *, is_search: bool = False) -> int:
        """Save the runs if requested; return 1 if a request failed or, in a search, had a wrong result."""
        options = self.options
        if options.json:
            settings = describe(options) | {"images": str(len(self._samples))}
            save_record(options.json, make_record(settings, self.runs, self._service.server))
            print(f"\nwritten: {options.json}")
        return int(any(one.outcome.statuses.get("wrong") or (one.outcome.failed and not is_search) for one in self.runs))

    def _drive(self, requests: int | None, seconds: float, *, clients: int | None = None, rate: float | None = None) -> Outcome:
        progress = watch(f"{self.options.name}, {f'{rate:g}/s' if rate else f'{clients} clients'}", seconds)
        if rate:
            seconds = min(seconds, requests / rate) if requests else seconds
        driver = Driver(self._service.target, self._samples, seconds, progress=progress)
        if rate:
            return run(driver.constant(rate))
        return run(driver.closed(clients or 1, requests=requests, is_polite=self.is_polite))

    def _missing(self) -> str:
        if not self._triton:
            return "Triton was not asked; name its gRPC endpoint with --triton"
        return "the answers do not name the model; name it with --model"

    def _find_processes(self) -> dict[str, list[psutil.Process]]:
        if self.is_elsewhere:
            return {}
        tritons = listeners(self._triton)
        stubs = [child for process in tritons for child in children(process)]
        return {"gateway": listeners(f"localhost:{self._service.target.port}"), "triton": tritons, "stubs": stubs}


def full(session: Session) -> int:
    """Load the server as the options say, once."""
    print(sheet(session.measure(clients=session.options.clients, rate=session.options.rate)))
    return session.finish()


def sweep(session: Session) -> int:
    """Measure one number of clients after the other."""
    for clients in SWEEP:
        session.measure(clients=clients)
    print(overview(session.runs))
    return session.finish(is_search=True)


def sustained(session: Session) -> int:
    """Find the number of clients with the best throughput, a p99 below the limit and no failed requests."""
    limit = session.options.p99
    tried: dict[int, Run] = {}

    def holds(clients: int) -> bool:
        tried[clients] = session.measure(clients=clients)
        return not tried[clients].outcome.failed and tried[clients].outcome.percentile(99) <= limit

    best = find_best(holds, lambda clients: tried[clients].outcome.rate, MAX_CLIENTS)
    print(overview([run for _, run in sorted(tried.items())]))
    if best is None:
        print(f"\np99 is above {limit:g} ms, or requests fail, even with the fewest clients")
    else:
        print(f"\nbest within p99 <= {limit:g} ms: {best} clients\n\n{sheet(tried[best])}")
    return session.finish(is_search=True)


def find_best(holds: Callable[[int], bool], rate: Callable[[int], float], max_clients: int) -> int | None:
    """Double the clients until the latency limit breaks or throughput falls twice; then search between the best's neighbours.

    `holds` measures with a number of clients, each once, and returns whether the limit holds; `rate` returns the throughput then.
    The result is the smallest number of clients with the best throughput; None if the limit does not hold with one client.
    """
    good: list[int] = []
    tried: list[int] = []

    def best() -> int:
        highest = max(map(rate, good))
        return min(clients for clients in good if rate(clients) * (1 + WORTH) >= highest)

    clients, falls = 1, 0
    while clients <= max_clients and falls < _MAX_FALLS:
        tried.append(clients)
        if not holds(clients):
            break
        falls = falls + 1 if good and rate(clients) <= rate(best()) * (1 + WORTH) else 0
        good.append(clients)
        clients *= 2
    for _ in range(_REFINEMENTS if good else 0):
        around = sorted(tried)
        place = around.index(best())
        neighbours = around[max(0, place - 1) : place] + around[place + 1 : place + 2]
        for between in sorted({(best() + neighbour) // 2 for neighbour in neighbours} - set(tried)):
            tried.append(between)
            if holds(between):
                good.append(between)
    return best() if good else None


def add_to(commands: Commands) -> None:
    """Add these experiments to the command line."""
    entries: dict[str, tuple[Callable[[Session], int], str]] = {
        "quick": (full, "16 clients for 30 seconds"),
        "full": (full, "--clients for --duration"),
        "sustained": (sustained, "the number of clients with the best throughput whose p99 holds"),
        "sweep": (sweep, f"{', '.join(map(str, SWEEP))} clients"),
        "open": (full, "a constant rate; latency from when a request was due"),
    }
    for name, (function, description) in entries.items():
        command = commands.add_parser(name, help=f"{description} (a server must run)")
        add_service(command, "a path that ends in / is a prefix of Nereid's routes, another one is the route to use")
        command.add_argument("--model", help="model to use; by default the server's own")
        command.add_argument("--triton", help="gRPC endpoint of the server's Triton; by default that in the settings")
        add_shared(command, json=None)
        command.set_defaults(clients=None, rate=None)
        if name == "full":
            command.add_argument("--clients", type=count, default=QUICK_CLIENTS, help="number of concurrent clients")
        if name == "open":
            command.add_argument("--rate", type=positive, required=True, help="requests per second")
        if name == "sustained":
            command.add_argument("--p99", type=positive, default=500.0, help="maximum p99 latency in milliseconds")
        if name == "quick":
            command.set_defaults(clients=QUICK_CLIENTS, duration=QUICK_SECONDS)
        else:
            seconds = {"sustained": 5.0, "sweep": 10.0}.get(name, 60.0)
            command.add_argument("--duration", type=positive, default=seconds, help="seconds per run")
        command.set_defaults(run=partial(_run, function), name=name)


def _run(function: Callable[[Session], int], options: argparse.Namespace) -> int:
    with one_line(options.url):
        return function(Session(options))


def _plan(options: argparse.Namespace) -> Plan:
    """Return the load of an experiment, at most."""
    if options.name == "sustained":
        return Plan(MAX_CLIENTS, options.duration, MAX_TRIES)
    if options.name == "sweep":
        return Plan(max(SWEEP), options.duration, len(SWEEP))
    if options.name == "gpu":
        return Plan(max(options.clients), options.duration, len(options.clients) + 1)
    if options.name == "open":
        return Plan(OPEN_CONNECTIONS, options.duration, rate=options.rate)
    return Plan(options.clients, options.duration)
