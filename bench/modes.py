"""The ways to load one server: quick, full, sustained, sweep, open."""

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from app import config
from bench import load, pictures, results
from bench.load import Outcome, Sample
from bench.results import Meters, Run

QUICK_CLIENTS, QUICK_SECONDS = 16, 30.0
WARM_UP_CLIENTS, WARM_UP_SECONDS = 4, 1.0
SWEEP = (1, 10, 50, 100, 256)
MOST_CLIENTS = 256
WORTH = 0.02
"""Share of throughput that more clients must bring to be preferred."""
BATCHES_SHOWN = 6

Ask = Callable[[load.Progress], Outcome]


class Bench:
    """A server, what is sent to it, and the runs so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model: str = options.model or config.load().model
        self.url = _endpoint(options.url, options.model)
        self.samples: tuple[Sample, ...] = pictures.given(options.image)
        self.runs: list[Run] = []

    def closed(self, clients: int, seconds: float) -> Run:
        """Load the server with clients that wait for their answers."""
        limit = self.options.requests

        def ask(progress: load.Progress) -> Outcome:
            asking = load.closed(self.url, self.samples, clients=clients, seconds=seconds, requests=limit, progress=progress)
            return load.run(asking)

        return self._measured(ask, seconds, clients=clients)

    def open(self, rate: float, seconds: float) -> Run:
        """Load the server at a constant rate, whatever it does."""
        if self.options.requests:
            seconds = min(seconds, self.options.requests / rate)

        def ask(progress: load.Progress) -> Outcome:
            return load.run(load.constant(self.url, self.samples, rate=rate, seconds=seconds, progress=progress))

        return self._measured(ask, seconds, rate=rate)

    def finish(self, *, is_search: bool = False) -> int:
        """Save what was asked for; say with the exit status whether anything failed, or in a search, was wrong."""
        options = self.options
        if options.json:
            settings = {
                name: str(value) for name, value in vars(options).items() if name not in {"run", "json"} and value is not None
            }
            results.save(options.json, results.record(self.runs, settings | {"pictures": str(len(self.samples))}))
            print(f"\nwritten: {options.json}")
        return int(any(run.outcome.statuses.get("wrong") or (run.outcome.failed and not is_search) for run in self.runs))

    def _measured(self, ask: Ask, seconds: float, clients: int | None = None, rate: float | None = None) -> Run:
        label = f"{clients} clients" if clients else f"{rate:g}/s"
        if not self.runs:  # the first requests after a start are slower
            load.run(
                load.closed(
                    self.url, self.samples, clients=min(clients or WARM_UP_CLIENTS, WARM_UP_CLIENTS), seconds=WARM_UP_SECONDS
                )
            )
        meters = Meters(self.url, self.options.triton, self.model)
        outcome = shown(f"{self.options.name}, {label}", seconds, ask)
        cpu, triton, note = meters.read(outcome)
        run = Run(
            contestant=self.options.label,
            mode=self.options.name,
            model=self.model,
            clients=clients,
            rate=rate,
            outcome=outcome,
            triton=triton,
            triton_note=note,
            cpu_ms=cpu,
        )
        self.runs.append(run)
        return run


def quick(options: argparse.Namespace) -> int:
    """16 clients for 30 seconds."""
    bench = Bench(options)
    print(sheet(bench.closed(QUICK_CLIENTS, QUICK_SECONDS)))
    return bench.finish()


def full(options: argparse.Namespace) -> int:
    """As many clients for as long as the caller says."""
    bench = Bench(options)
    print(sheet(bench.closed(options.clients, options.duration)))
    return bench.finish()


def sweep(options: argparse.Namespace) -> int:
    """Measure one number of clients after the other."""
    bench = Bench(options)
    for clients in SWEEP:
        bench.closed(clients, options.duration)
    print(overview(bench.runs))
    return bench.finish(is_search=True)


def constant(options: argparse.Namespace) -> int:
    """Ask at a constant rate."""
    bench = Bench(options)
    print(sheet(bench.open(options.rate, options.duration)))
    return bench.finish()


def sustained(options: argparse.Namespace) -> int:
    """Find the number of clients with the best throughput whose p99 holds, and no request fails."""
    bench = Bench(options)
    tried: dict[int, Run] = {}

    def holds(clients: int) -> bool:
        if clients not in tried:
            tried[clients] = bench.closed(clients, options.duration)
        run = tried[clients]
        return not run.outcome.failed and run.outcome.percentile(99) <= options.p99

    best = search(holds, lambda clients: tried[clients].outcome.rate, MOST_CLIENTS)
    print(overview(sorted(tried.values(), key=lambda run: run.clients or 0)))
    if best is None:
        print(f"\np99 is above {options.p99:g} ms, or requests fail, even with the fewest clients")
    else:
        print(f"\nbest within p99 <= {options.p99:g} ms: {best} clients\n\n{sheet(tried[best])}")
    return bench.finish(is_search=True)


def search(holds: Callable[[int], bool], rate: Callable[[int], float], most: int) -> int | None:
    """Double the clients until the latency breaks or throughput falls twice, then look between the neighbours of the best."""
    good: list[int] = []
    tried: list[int] = []
    falls = 0
    clients = 1
    while clients <= most and falls < 2:  # noqa: PLR2004
        tried.append(clients)
        if not holds(clients):
            break
        falls = falls + 1 if good and rate(clients) <= rate(_best(good, rate)) * (1 + WORTH) else 0
        good.append(clients)
        clients *= 2
    if not good:
        return None
    for _ in range(2):
        best, around = _best(good, rate), sorted(tried)
        place = around.index(best)
        neighbours = around[max(0, place - 1) : place] + around[place + 1 : place + 2]
        for clients in sorted({(best + neighbour) // 2 for neighbour in neighbours} - set(tried)):
            tried.append(clients)
            if holds(clients):
                good.append(clients)
    return _best(good, rate)


def shown(label: str, seconds: float, ask: Ask) -> Outcome:
    """Draw a bar while a run lasts, if a person is looking."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return ask(lambda _seconds, _requests: None)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=seconds, said="")

        def tell(elapsed: float, requests: int) -> None:
            said = f"{requests} answers, {requests / elapsed:.0f}/s" if elapsed else ""
            progress.update(task, completed=min(elapsed, seconds), said=said)

        return ask(tell)


def sheet(run: Run) -> str:
    """Tell everything about one run."""
    outcome = run.outcome
    lines = [
        ("load", f"{run.load} for {outcome.seconds:.1f} s, {run.model}"),
        ("requests", f"{outcome.requests:,}"),
        ("requests/s", results.number(outcome.rate)),
        ("mean", f"{results.number(outcome.mean)} ms"),
        *((f"p{percent}", f"{results.number(outcome.percentile(percent))} ms") for percent in results.PERCENTILES),
        ("max", f"{results.number(outcome.max)} ms"),
        ("error rate", f"{outcome.failed:.2%}"),
        ("responses", _statuses(run)),
        ("Server-Timing", _list(outcome.stages, "ms") or "- (the server sends none)"),
        ("Triton", _triton(run)),
        ("CPU per request", _list(run.cpu_ms, "ms")),
        ("load driver", f"{outcome.driver_cpu:.0%} of a core"),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in lines)


def overview(runs: Iterable[Run]) -> str:
    """Put several runs side by side."""
    head = [
        "load",
        "requests/s",
        "mean",
        "p50",
        "p90",
        "p95",
        "p99",
        "max",
        "errors %",
        "batch",
        "queue",
        "gateway",
        "Triton",
        "stubs",
    ]
    names = [*head[1:9], "mean batch", "queue", "cpu gateway", "cpu triton", "cpu stubs"]
    runs = list(runs)
    rows = [[run.load, *(results.number(run.figures[name]) if name in run.figures else "-" for name in names)] for run in runs]
    notes = [f"{run.load}: {_statuses(run)}" for run in runs if run.outcome.failed]
    notes += sorted({run.triton_note for run in runs if run.triton_note})
    return "\n".join([results.table([head, *rows]), "times in ms; gateway, Triton, stubs: CPU per request", *notes])


def _best(good: list[int], rate: Callable[[int], float]) -> int:
    """Choose the fewest clients whose throughput is as good as the best."""
    most = max(map(rate, good))
    return min(clients for clients in good if rate(clients) * (1 + WORTH) >= most)


def _endpoint(url: str, model: str | None) -> str:
    """Add the route to a URL that has none."""
    parts = urlsplit(url)
    if parts.path not in {"", "/"}:
        return url
    return urlunsplit(parts._replace(path=f"/predict/{model}" if model else "/detect"))


def _list(values: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {results.number(value)}" for name, value in values.items()) + f" {unit}" if values else ""


def _statuses(run: Run) -> str:
    return ", ".join(f"{status}: {count:,}" for status, count in run.outcome.statuses.items())


def _triton(run: Run) -> str:
    use = run.triton
    if use is None:
        return f"- ({run.triton_note})"
    common = sorted(use.batches.items(), key=lambda item: -item[1])[:BATCHES_SHOWN]
    sizes = ", ".join(f"{size}: {count:,}" for size, count in sorted(common, key=lambda item: int(item[0])))
    times = f"queue {results.number(use.queue_ms)} ms, compute {results.number(use.compute_ms)} ms"
    return f"mean batch {use.mean_batch:.2f} ({sizes}), {times}"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the modes to the command line."""
    entries: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
        "quick": (quick, "16 clients for 30 seconds"),
        "full": (full, "--clients for --duration"),
        "sustained": (sustained, "the number of clients with the best throughput whose p99 holds"),
        "sweep": (sweep, f"{', '.join(map(str, SWEEP))} clients"),
        "open": (constant, "a constant rate; latency from when a request was due"),
    }
    for name, (function, description) in entries.items():
        command = commands.add_parser(name, help=f"{description} (a server must run)")
        command.add_argument("--url", default="http://127.0.0.1:4603", help="of the server; with a path, if it is not Nereid")
        command.add_argument(
            "--image", type=Path, metavar="FILE|DIR", help="to send; by default 24 pictures, 320 pixels to 12 megapixels"
        )
        command.add_argument("--requests", type=_count, help="end after so many")
        command.add_argument("--model", help="to ask; by default the server's")
        command.add_argument("--triton", default="http://127.0.0.1:4600", help="HTTP endpoint of the Triton behind it")
        command.add_argument("--json", type=Path, metavar="OUT", help="write the results here, for compare and report")
        command.add_argument("--label", default="nereid", help="what the results call the server")
        if name == "full":
            command.add_argument("--clients", type=_count, default=QUICK_CLIENTS, help="that ask at the same time")
        if name == "open":
            command.add_argument("--rate", type=_positive, required=True, help="requests per second")
        if name == "sustained":
            command.add_argument("--p99", type=_positive, default=500.0, help="milliseconds that 99 of 100 answers may take")
        if name != "quick":
            seconds = {"sustained": 5.0, "sweep": 10.0}.get(name, 60.0)
            command.add_argument("--duration", type=_positive, default=seconds, help="seconds, of each run")
        command.set_defaults(run=partial(_told, function), name=name)


def _told(function: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a mode; what a caller can mend is one line."""
    try:
        return function(options)
    except ConnectionRefusedError:
        print(f"nobody listens at {options.url}; start a server: ./just serve", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 1


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above zero")
    return value
