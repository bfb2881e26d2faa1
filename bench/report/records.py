"""The schema of everything that is measured, and the JSON files it is kept in."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from bench.load.outcome import Outcome
from bench.report.machine import Machine, describe_machine, package_versions, read_commit

PERCENTILES = (50, 90, 95, 99)
KINDS = ("gateway", "triton", "stubs", "client")
"""Kinds of processes whose CPU time is measured: the server, Triton, the processes of Triton's models, the load driver."""
UNKNOWN_MODEL = "-"
"""Stands for the model where neither the answers nor the command line name one."""


class TritonUse(msgspec.Struct, frozen=True):
    """What one model did in Triton during a run."""

    inferences: int
    executions: int
    queue_ms: float
    """Mean time that a request waited."""
    compute_ms: float
    """Mean time that the batch of a request spent in the model, including input and output."""
    batches: dict[str, int]
    """Executions by batch size."""

    @property
    def mean_batch(self) -> float:
        """Inferences per execution."""
        return self.inferences / self.executions if self.executions else 0.0


class Measurement(msgspec.Struct, kw_only=True):
    """One server under one load."""

    outcome: Outcome
    cpu_ms: dict[str, float] = {}
    """CPU time per request by kind of process, as far as the processes run on this machine."""
    triton: TritonUse | None = None
    triton_note: str = ""
    """Why `triton` is None."""
    figures: dict[str, float] = {}
    """The main numbers of the above by name, for programs that cannot read HDR histograms."""

    def __post_init__(self) -> None:
        self.figures = self.figures or self._figures()

    def _figures(self) -> dict[str, float]:
        """Name the numbers; milliseconds unless the name says otherwise."""
        outcome = self.outcome
        numbers = {"requests/s": outcome.rate, "mean": outcome.mean}
        numbers |= {f"p{percent}": outcome.percentile(percent) for percent in PERCENTILES}
        numbers |= {"max": outcome.max, "errors %": outcome.failed * 100}
        if outcome.rejections:
            numbers |= {f"rejected p{percent}": outcome.rejection_percentile(percent) for percent in (50, 99)}
        numbers |= {f"cpu {kind}": value for kind, value in self.cpu_ms.items()}
        if self.triton:
            numbers |= {"mean batch": self.triton.mean_batch, "queue": self.triton.queue_ms}
        numbers |= {f"stage {name}": value for name, value in outcome.stages.items()}
        return {name: round(value, 4) for name, value in numbers.items()}


class WorkerMemory(msgspec.Struct, frozen=True):
    """The memory of one worker over time."""

    seconds: list[float]
    """When it was read, since the load began."""
    resident_mib: list[float]
    """Including what it shares with other processes."""
    proportional_mib: list[float]
    """With an equal part of what it shares with other processes."""


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a server under more load than it can bear, besides its answers."""

    phase: str
    """Name of the load."""
    offered: float
    """Requests per second, those that were dropped included."""
    peak: float
    """The most correct answers per second that the server gives if its clients wait for it."""
    before_ms: float | None = None
    """Median latency of a single client before the load."""
    after_ms: float | None = None
    """The same after it; None: no correct answer, or not measured."""
    memory: list[WorkerMemory] = []
    """Of each worker, from the beginning of the load until some time after it."""

    def figures(self) -> dict[str, float]:
        """Name the main numbers; memory is that of the largest worker."""
        numbers = {"offered/s": self.offered, "peak/s": self.peak}
        if self.before_ms and self.after_ms:
            numbers["recovery"] = self.after_ms / self.before_ms
        for name, series in (
            ("resident", [worker.resident_mib for worker in self.memory]),
            ("proportional", [worker.proportional_mib for worker in self.memory]),
        ):
            read = [values for values in series if values]
            if read:
                numbers[f"{name} MiB before"] = max(values[0] for values in read)
                numbers[f"{name} MiB peak"] = max(max(values) for values in read)
                numbers[f"{name} MiB after"] = max(values[-1] for values in read)
        return numbers


class Run(Measurement, kw_only=True):
    """A measurement that stands for itself."""

    contestant: str
    """Name of the server."""
    mode: str
    """Name of the experiment."""
    model: str
    """Name of the model that answered."""
    clients: int | None = None
    rate: float | None = None
    """Requests per second, if the load had a constant rate."""
    overload: Overload | None = None

    @property
    def load(self) -> str:
        """Describe the load. Under overload, it depends on the peak that was measured, so it is named after its phase."""
        if self.overload:
            return self.overload.phase
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.clients} client{'' if self.clients == 1 else 's'}"

    def _figures(self) -> dict[str, float]:
        numbers = super()._figures()
        if self.rate is not None:
            numbers["sent late p99"] = round(self.outcome.delay_p99, 4)
        if self.overload:
            more = {"goodput": self.outcome.goodput} | self.overload.figures()
            numbers |= {name: round(value, 4) for name, value in more.items()}
        return numbers

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What two runs must have in common to be compared."""
        return self.contestant, self.mode, self.model, self.load


class ContestantResult(msgspec.Struct, kw_only=True):
    """One contestant of a contest and its rounds."""

    name: str
    model: str
    """Name of the model that answered."""
    note: str
    """What kind of server it is."""
    rounds: list[Measurement] = []
    resident_mib: list[float] = []
    """Memory of each worker at the end."""
    unshared_mib: list[float] = []
    """The part of it that no other process uses."""

    def median(self, figure: str) -> float:
        """Return the median of a figure over the rounds; a round without it counts as zero."""
        return median(one.figures.get(figure, 0.0) for one in self.rounds) if self.rounds else 0.0

    def ratios(self, base: "ContestantResult", figure: str) -> list[float]:
        """Divide a figure by that of another, round by round: noise that hits a whole round cancels out."""
        pairs = [
            (one.figures.get(figure, 0.0), other.figures.get(figure)) for one, other in zip(self.rounds, base.rounds, strict=False)
        ]
        return [one / other for one, other in pairs if other]


class Comparison(msgspec.Struct, frozen=True):
    """Contestants to be compared with others."""

    title: str
    """What they are compared with."""
    pairs: list[tuple[str, str]]
    """Name of a contestant, and of the one it is compared with."""


class Contest(msgspec.Struct, kw_only=True):
    """Several servers under the same load, in interleaved rounds."""

    title: str
    clients: int
    workers: int
    """Number of processes of each contestant."""
    seconds: float
    """Length of each round."""
    entries: list[ContestantResult]
    left_out: dict[str, str] = {}
    """Contestants that could not take part, and why."""
    comparisons: list[Comparison] = []

    def ratios(self, name: str, base: str, figure: str) -> list[float]:
        """Divide a figure of one contestant by that of another, round by round."""
        entries = {entry.name: entry for entry in self.entries}
        return entries[name].ratios(entries[base], figure)

    def runs(self) -> list[Run]:
        """Represent each contestant by its round of median throughput."""
        found = []
        for entry in self.entries:
            if not entry.rounds:
                continue
            middle = sorted(entry.rounds, key=lambda one: one.outcome.rate)[len(entry.rounds) // 2]
            found.append(
                Run(
                    contestant=entry.name,
                    mode=f"versus: {self.title}",
                    model=entry.model,
                    clients=self.clients,
                    outcome=middle.outcome,
                    cpu_ms=middle.cpu_ms,
                    triton=middle.triton,
                    triton_note=middle.triton_note,
                    figures=middle.figures | {"worker MiB": round(max(entry.resident_mib, default=0.0), 1)},
                )
            )
        return found


class Record(msgspec.Struct, kw_only=True):
    """One session of the bench."""

    when: str
    commit: str | None
    machine: Machine
    versions: dict[str, str]
    settings: dict[str, str]
    """The options of the command line."""
    runs: list[Run]
    contests: list[Contest]

    @property
    def all_runs(self) -> list[Run]:
        """The runs, and one for each contestant of a contest."""
        return [*self.runs, *(run for contest in self.contests for run in contest.runs())]


def make_record(settings: Mapping[str, str], runs: Sequence[Run] = (), contests: Sequence[Contest] = ()) -> Record:
    """Put measurements on record, with this machine and the versions in use."""
    return Record(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=read_commit(),
        machine=describe_machine(),
        versions=package_versions(),
        settings=dict(settings),
        runs=list(runs),
        contests=list(contests),
    )


def save_record(path: Path, record: Record) -> None:
    """Write a record as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: The file cannot be read, or is not a record of this version of the bench.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a record of this bench: {error}") from error
