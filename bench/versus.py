"""Nereid beside other ways to do the same: same Triton, pictures, client and number of workers, in interleaved rounds."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from app.config import PREFIX
from app.embedded import EmbeddedError
from bench import load, models, pictures, processes
from bench import results as kept
from bench.load import Outcome, Sample
from bench.processes import ContestantError, Entrant, Memory, Running, Triton
from bench.results import TritonUse

NAMES = ("reference", "reference_uint8", "broken", "in_process", "nereid_inline", "nereid_shm", "nereid_file")
MODELS = ("null", "sim_gpu", "yolo11n")
CONTESTS = ("load", "one", "photo", "batching", "in_process", "memory")
"""What can be compared.

`load`: all entrants at once, `--clients` clients. `one`: the same with one client. `photo`: one client, 12 megapixels.
`batching`: the simulated GPU against the same without batches, 64 clients. `in_process`: yolo11n through Triton against
ONNX Runtime in the web server's process, 1 and 6 clients. `memory`: what each worker holds over 10,000 requests.
"""

_DEFAULT = {"null": ("load",), "sim_gpu": ("load", "batching"), "yolo11n": ("load", "in_process")}
_BASES = ("reference", "reference_uint8", "in_process", "batch1")
_WARM_UP_SECONDS = 1.5
_ENDURED = 10_000
_ENDURANCE_SECONDS = 120.0
_SHARED = processes.ROOT.parent / "shared" / "images"
_MB = 2**20


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of one entrant gave; CPU in milliseconds per request."""

    rate: float
    p50: float
    p99: float
    failed: float
    cpu_gateway: float
    cpu_triton: float
    cpu_stubs: float
    cpu_client: float
    client_share: float
    """Of one core that the driver used."""
    triton: TritonUse | None
    outcome: Outcome


class Entry(msgspec.Struct, kw_only=True):
    """One entrant and its rounds."""

    name: str
    model: str
    note: str
    rounds: list[Round]
    resident: list[float]
    """Of each worker at the end, MiB."""
    unshared: list[float]
    """The part of it that nobody else uses, MiB."""


class Contest(msgspec.Struct, kw_only=True):
    """One comparison."""

    title: str
    model: str
    clients: int
    workers: int
    seconds: float
    entries: list[Entry]
    left_out: dict[str, str]
    """Why, by name."""

    def runs(self) -> list[kept.Run]:
        """Put each entrant on file by its round of median throughput."""
        found = []
        for entry in self.entries:
            if not entry.rounds:
                continue
            one = sorted(entry.rounds, key=lambda one: one.rate)[len(entry.rounds) // 2]
            cpu = {"gateway": one.cpu_gateway, "triton": one.cpu_triton, "stubs": one.cpu_stubs, "client": one.cpu_client}
            mode = f"versus: {self.title}"
            run = kept.Run(
                contestant=entry.name,
                mode=mode,
                model=entry.model,
                clients=self.clients,
                outcome=one.outcome,
                triton=one.triton,
                cpu_ms=cpu,
            )
            run.figures["worker MiB"] = round(max(entry.resident, default=0.0), 1)
            found.append(run)
        return found

    def bases(self) -> list[str]:
        """Name the entrants that others are compared with."""
        return [entry.name for entry in self.entries if entry.name in _BASES]

    def compared_with(self, base: str) -> list[str]:
        """Name the entrants to set against a base: no base that comes before it."""
        bases = self.bases()
        return [e.name for e in self.entries if e.name not in bases[: bases.index(base) + 1]]

    def ratios(self, name: str, base: str, what: str) -> list[float]:
        """Divide a figure of one entrant by that of another, round by round."""
        by_name = {entry.name: entry.rounds for entry in self.entries}
        pairs = zip(by_name[name], by_name[base], strict=False)
        return [getattr(one, what) / getattr(other, what) for one, other in pairs if getattr(other, what)]


def run(options: argparse.Namespace) -> int:
    """Hold the contests that the command line asks for and print a table of each."""
    results = []
    wanted = options.contests or _DEFAULT[options.model]
    try:
        if options.install:
            processes.install_reference()
        with processes.triton(with_real=options.model == "yolo11n" or "in_process" in wanted) as triton:
            if "memory" in wanted:
                with TemporaryDirectory(prefix="nereid-bench-") as logs:
                    _show_memory(Lineup(triton, options.workers, Path(logs)), options)
            for plan in _plans(wanted, options.model, options.clients, options.only or NAMES):
                with TemporaryDirectory(prefix="nereid-bench-") as logs:
                    lineup = Lineup(triton, options.workers, Path(logs))
                    results.append(_held(plan, lineup, options.pictures, options.rounds, options.seconds))
                _show(results[-1])
    except (ContestantError, EmbeddedError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; what was complete is above", file=sys.stderr)
        return 130
    finally:
        if options.json is not None and results:
            kept.save(
                options.json, kept.record([run for contest in results for run in contest.runs()], _settings(options, results))
            )
    return 0


def _settings(options: argparse.Namespace, contests: list[Contest]) -> dict[str, object]:
    asked = {name: str(value) for name, value in vars(options).items() if name != "run"}
    return asked | {"contests": msgspec.to_builtins(contests)}


class _Plan(msgspec.Struct, kw_only=True):
    title: str
    entrants: list[tuple[str, str]]
    """Name and model (of `MODELS`, or with a suffix)."""
    clients: int
    is_photo: bool = False


def _plans(wanted: Sequence[str], model: str, clients: int, names: Sequence[str]) -> Iterator[_Plan]:
    common = [(name, model) for name in names if name != "in_process" or model == "yolo11n"]
    nereid = next((name for name in ("nereid_file", "nereid_shm", "nereid_inline") if name in names), "nereid_file")
    for contest in wanted:
        match contest:
            case "load":
                yield _Plan(title=f"{model}, {clients} clients", entrants=common, clients=clients)
            case "one":
                yield _Plan(title=f"{model}, one client", entrants=common, clients=1)
            case "photo":
                yield _Plan(title=f"{model}, one client, 12 megapixels", entrants=common, clients=1, is_photo=True)
            case "batching":
                pair = [("batch1", "sim_gpu_batch1"), (nereid, "sim_gpu")]
                yield _Plan(title="batching against batches of one, 64 clients, simulated GPU", entrants=pair, clients=64)
            case "memory":
                continue
            case _:
                pair = [(name, "yolo11n") for name in ("in_process", "nereid_inline", "nereid_shm") if name in names]
                for count in (1, 6):
                    plural = "clients" if count > 1 else "client"
                    yield _Plan(title=f"ONNX Runtime in the process against Triton, {count} {plural}", entrants=pair, clients=count)


class Lineup:
    """Makes entrants for one Triton."""

    def __init__(self, triton: Triton, workers: int, logs: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Run each with so many `workers`; Nereid with other `settings`, too."""
        self.settings = settings
        self.triton = triton
        self.workers = workers
        self.logs = logs

    def entrant(self, name: str, model: str) -> Entrant:
        """Describe one.

        Raises:
            ContestantError: It cannot take part; the message says why.
        """
        port = processes.free_ports(1)[0]
        if name in {"reference", "reference_uint8", "broken", "in_process"}:
            return self._uvicorn(name, model, port)
        return self._nereid(name, model, port)

    def _uvicorn(self, name: str, model: str, port: int) -> Entrant:
        python = processes.reference_python()
        is_local, is_bytes = name == "in_process", name.endswith("_uint8")
        asked = model if is_local or is_bytes else f"{model}_fp32"
        target = str(self.triton.repository / model / "1" / "model.onnx") if is_local else asked
        workers = 1 if is_local else self.workers
        # The options of the seeds' guide.
        options = {
            "port": port,
            "workers": workers,
            "loop": "uvloop",
            "http": "httptools",
            "limit-concurrency": 512,
            "backlog": 8192,
            "timeout-keep-alive": 120,
        }
        return Entrant(
            name=name,
            command=[
                str(python),
                *("-m", "uvicorn", f"bench.contestants.{name.removesuffix('_uint8')}:app"),
                *(f"--{option}={value}" for option, value in options.items()),
            ],
            environment={
                "BENCH_TRITON": self.triton.settings.triton_url,
                "BENCH_MODEL": target,
                "BENCH_LABELS": models.labels(self.triton.repository, asked),
                "BENCH_TENSOR": "UINT8" if is_bytes else "FP32",
                "GRPC_ENABLE_FORK_SUPPORT": "1",
                "GRPC_POLL_STRATEGY": "epoll1",
            },
            port=port,
            probe="/health",
            model="" if is_local else asked,
            workers=workers,
            note={
                "reference": "FastAPI, uvicorn, stock Pillow, one blocking gRPC client per worker",
                "reference_uint8": "the reference sending bytes instead of floats to Nereid's model: a quarter of its traffic",
                "broken": "the reference with a new client per request",
                "in_process": "FastAPI with one ONNX Runtime session, one worker",
            }[name],
        )

    def _nereid(self, name: str, model: str, port: int) -> Entrant:
        is_file = name == "nereid_file" or (name == "batch1" and model.startswith("sim_gpu"))
        asked = f"{model}_file" if is_file else model
        if not (self.triton.repository / asked).is_dir():
            raise ContestantError(f"there is no {asked}, a model that takes the file itself")
        environment = {
            "NEREID_PORT": str(port),
            "NEREID_WORKERS": str(self.workers),
            "NEREID_TRITON_URLS": self.triton.settings.triton_url,
            "NEREID_MODEL": asked,
            "NEREID_LOG_FORMAT": "json",
            **self.settings,
        }
        if name in {"nereid_inline", "nereid_shm"}:
            transport = {"NEREID_TRANSPORT": name.removeprefix("nereid_")}
            if _knows(transport):
                environment |= transport
            elif name == "nereid_shm":
                raise ContestantError("this Nereid does not know NEREID_TRANSPORT=shm")
        return Entrant(
            name=name,
            command=[sys.executable, "-m", "app", "api"],
            environment=environment,
            port=port,
            probe="/readyz",
            model=asked,
            workers=self.workers,
            note={
                "nereid_inline": "pixels in the gRPC message",
                "nereid_shm": "pixels in shared memory",
                "nereid_file": "the file itself in shared memory, nothing decoded",
                "batch1": "Nereid, the model taking one picture at a time",
            }[name],
        )


def _knows(environment: dict[str, str]) -> bool:
    """Ask this checkout's Nereid whether it has a setting."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    command = [sys.executable, "-m", "app", "settings"]
    return not subprocess.run(command, cwd=processes.ROOT, env=kept | environment, capture_output=True, check=False).returncode


def _held(plan: _Plan, lineup: Lineup, folder: Path | None, rounds: int, seconds: float) -> Contest:
    """Hold one contest: all entrants started and warm, then round after round of each in turn."""
    samples = _samples(plan, folder)
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        servers: list[tuple[Entrant, Running]] = []
        for name, model in plan.entrants:
            try:
                entrant = lineup.entrant(name, model)
                server = stack.enter_context(processes.started(entrant, lineup.logs))
            except ContestantError as error:
                left_out[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
                continue
            servers.append((entrant, server))
            entries.append(Entry(name=name, model=entrant.model, note=entrant.note, rounds=[], resident=[], unshared=[]))
        measure = _Measure(lineup.triton, samples, plan.clients)
        for entrant, server in servers:
            measure.round(entrant, server, max(_WARM_UP_SECONDS, seconds / 4))
        for number in range(rounds):
            for entry, (entrant, server) in zip(entries, servers, strict=True):
                entry.rounds.append(measure.round(entrant, server, seconds))
                _say(f"{plan.title}: round {number + 1} of {rounds}, {entry.name}: {entry.rounds[-1].rate:.0f}/s")
        for entry, (entrant, server) in zip(entries, servers, strict=True):
            memory = server.workers(entrant.workers)
            entry.resident = [worker.resident / _MB for worker in memory]
            entry.unshared = [worker.own / _MB for worker in memory]
    return Contest(
        title=plan.title,
        model=plan.entrants[-1][1] if plan.entrants else "",
        clients=plan.clients,
        workers=lineup.workers,
        seconds=seconds,
        entries=entries,
        left_out=left_out,
    )


def _samples(plan: _Plan, folder: Path | None) -> list[Sample]:
    if all(model == "yolo11n" for _, model in plan.entrants):
        return list(pictures.coco_sized(folder))  # without a folder, pictures of which we know what is on them
    if plan.is_photo:
        return [max(pictures.varied(), key=lambda sample: len(sample.body))._replace(expected=frozenset())]
    return samples_of(folder)


def samples_of(folder: Path | None) -> list[Sample]:
    """Take COCO-sized pictures for the fixtures, which find nothing in them; without a folder, COCO's own if they are here."""
    found = pictures.coco_sized(folder or (_SHARED if _SHARED.is_dir() else None))
    return [sample._replace(expected=frozenset()) for sample in found]


def alone(lineup: Lineup, name: str, model: str, samples: list[Sample], clients: int, seconds: float) -> Round:  # noqa: PLR0913, PLR0917
    """Measure one entrant by itself.

    Raises:
        ContestantError: It cannot take part.
    """
    entrant = lineup.entrant(name, model)
    with processes.started(entrant, lineup.logs) as server:
        measure = _Measure(lineup.triton, samples, clients)
        measure.round(entrant, server, _WARM_UP_SECONDS)
        return measure.round(entrant, server, seconds)


def _show_memory(lineup: Lineup, options: argparse.Namespace) -> None:
    """Print the memory of Nereid's workers and of the reference's while they answer request after request."""
    samples = samples_of(options.pictures)
    names = [
        name for name in (options.only or ("reference_uint8", "nereid_inline", "nereid_shm", "nereid_file")) if name != "in_process"
    ]
    print(f"\nMiB of each of {lineup.workers} workers after 1,000, 2,000 ... {_ENDURED:,} requests a worker (unshared in brackets)")
    for name in names:
        try:
            entrant = lineup.entrant(name, options.model)
        except ContestantError as error:
            print(f"{name} is left out: {error}")
            continue
        with processes.started(entrant, lineup.logs) as server:
            held: list[list[Memory]] = []
            for _ in range(_ENDURED // 1000):
                asking = load.closed(
                    f"{server.url}/detect",
                    samples,
                    clients=options.clients,
                    seconds=_ENDURANCE_SECONDS,
                    requests=1000 * lineup.workers,
                )
                load.run(asking)
                held.append(server.workers(lineup.workers))
            cells = " ".join(f"{max(m.resident for m in now) / _MB:.0f}({max(m.own for m in now) / _MB:.0f})" for now in held)
            growth = (max(m.own for m in held[-1]) - max(m.own for m in held[1])) / _MB / (len(held) - 2)
            print(f"{name:15} {cells}; {growth:+.2f} MiB unshared per 1,000 requests since the 2,000th", flush=True)


class _Measure(NamedTuple):
    """How all entrants of a contest are measured."""

    triton: Triton
    samples: list[Sample]
    clients: int

    def round(self, entrant: Entrant, server: Running, seconds: float) -> Round:
        """Load one entrant for some seconds."""

        def used() -> tuple[float, float, float, float]:
            return server.cpu(), self.triton.server_cpu(), self.triton.stubs_cpu(), process_time()

        counted = self.triton.counters(entrant.model) if entrant.model else None
        before = used()
        outcome = load.run(load.closed(f"{server.url}/detect", self.samples, clients=self.clients, seconds=seconds))
        gateway, server_cpu, stubs, client = (after - start for after, start in zip(used(), before, strict=True))
        use = self.triton.counters(entrant.model).since(counted) if counted else None
        requests = max(outcome.requests, 1)
        return Round(
            rate=outcome.rate,
            p50=outcome.percentile(50),
            p99=outcome.percentile(99),
            failed=1 - outcome.statuses.get("200", 0) / requests,
            cpu_gateway=gateway / requests * 1e3,
            cpu_triton=server_cpu / requests * 1e3,
            cpu_stubs=stubs / requests * 1e3,
            cpu_client=client / requests * 1e3,
            client_share=outcome.driver_cpu,
            triton=use,
            outcome=outcome,
        )


def _say(text: str) -> None:
    """Tell a person who waits; a file gets the tables alone."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _show(contest: Contest) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    count = len(contest.entries[0].rounds) if contest.entries else 0
    print(f"\n{contest.title}; {contest.workers} workers; medians of {count} interleaved rounds of {contest.seconds:g} s")
    print(
        f"{'':15} {'req/s':>7} {'p50 ms':>7} {'p99 ms':>7} {'errors':>7} | {'gateway':>7} {'Triton':>7} {'stubs':>7} {'client':>7}"
        f" | {'MiB a worker':>12} {'batch':>6} {'queue':>6}"
    )
    print(f"{'':15} {'':31} | {'CPU, ms per request':^31} | {'(unshared)':>12} {'':>6} {'ms':>6}")
    for entry in contest.entries:
        print(_row(entry))
    for base in contest.bases():
        print(f"against {base}, median of the rounds' ratios (least..most):")
        for name in contest.compared_with(base):
            rate, cpu, p50 = (_spread(contest.ratios(name, base, what)) for what in ("rate", "cpu_gateway", "p50"))
            print(f"  {name:15} throughput {rate}, gateway's CPU {cpu}, p50 {p50}")
    for line in _remarks(contest):
        print(line)
    sys.stdout.flush()


def _row(entry: Entry) -> str:
    def middle(what: str) -> float:
        return float(median(getattr(one, what) for one in entry.rounds))

    uses = [one.triton for one in entry.rounds if one.triton]
    batch, queue = (median(values) if values else 0.0 for values in ([u.mean_batch for u in uses], [u.queue_ms for u in uses]))
    cpu = " ".join(f"{middle(f'cpu_{whose}'):7.2f}" for whose in ("gateway", "triton", "stubs", "client"))
    memory = f"{max(entry.resident, default=0):.0f} ({max(entry.unshared, default=0):.0f})"
    return (
        f"{entry.name:15} {middle('rate'):7.1f} {middle('p50'):7.1f} {middle('p99'):7.1f} {middle('failed'):7.1%} | {cpu} |"
        f" {memory:>12} {batch:6.1f} {queue:6.1f}"
    )


def _remarks(contest: Contest) -> Iterator[str]:
    """Say what the table does not."""
    for entry in contest.entries:
        if contest.clients == 1 and entry.rounds[0].outcome.stages:
            own = median(one.outcome.own_p50 for one in entry.rounds)
            yield f"{entry.name}: {own:.2f} ms of a request (p50) are neither decoding nor Triton, as the client sees it"
    busy = [entry.name for entry in contest.entries if any(one.client_share > load.BUSY for one in entry.rounds)]
    if busy:
        yield f"the client used more than {load.BUSY:.0%} of a core with {', '.join(busy)}: those may be faster than shown"
    failed = [entry.name for entry in contest.entries if any(one.failed for one in entry.rounds)]
    if failed:
        yield f"answers were wrong or missing: {', '.join(failed)}"


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} x ({min(values):.2f}..{max(values):.2f})" if values else "-"
