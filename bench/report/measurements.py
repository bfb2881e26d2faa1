"""Measurements of a server under load."""

from collections.abc import Sequence
from statistics import median
from typing import Self

import msgspec

from bench.load.outcome import Outcome

PERCENTILES = (50, 90, 95, 99)
UNKNOWN_MODEL = "-"
"""Placeholder if neither the responses nor the command line name the model."""


class TritonUse(msgspec.Struct, frozen=True):
    """Statistics of one model during a run, over all Tritons."""

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
    """CPU time per request by kind of process, for processes on this machine: `gateway`, which is the server, `triton`, `stubs`,
    which run Triton's models, and `client`, which is the load driver."""
    triton: TritonUse | None = None
    triton_note: str = ""
    """The reason if `triton` is None."""
    figures: dict[str, float] = {}
    """The main figures by name, for programs that cannot read HDR histograms."""

    def __post_init__(self) -> None:
        self.figures = self.figures or {name: round(value, 4) for name, value in self._figures().items()}

    def _figures(self) -> dict[str, float]:
        """Return the figures by name; in milliseconds unless the name has another unit."""
        outcome = self.outcome
        numbers = {"requests/s": outcome.rate, "mean": outcome.mean}
        numbers |= {f"p{percent}": outcome.percentile(percent) for percent in PERCENTILES}
        numbers |= {"max": outcome.max, "errors %": outcome.failed * 100}
        numbers |= {f"{status} %": count / outcome.requests * 100 for status, count in outcome.statuses.items() if status != "200"}
        if outcome.rejections:
            numbers |= {f"rejected p{percent}": outcome.rejection_percentile(percent) for percent in (50, 99)}
        numbers |= {f"cpu {kind}": value for kind, value in self.cpu_ms.items()}
        if servers := sum(value for kind, value in self.cpu_ms.items() if kind != "client") * ("stubs" in self.cpu_ms):
            numbers["model's CPU %"] = 100 - 100 * self.cpu_ms["gateway"] / servers
        if self.triton:
            numbers |= {"mean batch": self.triton.mean_batch, "queue": self.triton.queue_ms}
        numbers |= {f"stage {name}": value for name, value in outcome.stages.items()}
        return numbers | ({"outside": outcome.overhead_p50} if outcome.stages else {})


class WorkerMemory(msgspec.Struct, frozen=True):
    """The memory of one worker over time."""

    seconds: list[float]
    """Times of the samples since the start of the load."""
    resident_mib: list[float]
    """Memory including shared memory."""


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """Additional measurements of a server under load above its capacity."""

    phase: str
    """Name of the load."""
    offered: float
    """Requests per second, including dropped requests."""
    peak: float
    """Maximum number of correct responses per second with clients that wait for responses."""
    before_ms: float | None = None
    """Median latency of a single client before the load."""
    after_ms: float | None = None
    """Median latency of a single client after the load; None without a correct response, or if not measured."""
    memory: list[WorkerMemory] = []
    """Memory of each worker, from the start of the load until some time after its end."""

    def figures(self) -> dict[str, float]:
        """Return the main figures by name; the memory is that of the largest worker."""
        numbers = {"offered/s": self.offered, "peak/s": self.peak}
        if self.before_ms and self.after_ms:
            numbers["recovery"] = self.after_ms / self.before_ms
        if series := [worker.resident_mib for worker in self.memory if worker.seconds]:
            for name, place in (("before", 0), ("after", -1)):
                numbers[f"resident MiB {name}"] = max(values[place] for values in series)
            numbers["resident MiB peak"] = max(map(max, series))
        return numbers


class Run(Measurement, kw_only=True):
    """One server under one load, measured once or in several rounds."""

    contestant: str
    """Name of the server, or of what is asked of it."""
    mode: str
    """Name of the experiment."""
    model: str
    """Name of the model."""
    clients: int | None = None
    rate: float | None = None
    """Requests per second, if the load had a constant rate."""
    overload: Overload | None = None
    rounds: list[Measurement] = []
    """The rounds, of which this has the one with the median throughput; empty if it was measured once."""
    bases: list[str] = []
    """Contestants of the same experiment and rounds that this one is compared with."""

    @classmethod
    def of(cls, measured: Measurement, **about: object) -> Self:
        """Make a run of a measurement."""
        values = {name: getattr(measured, name) for name in Measurement.__struct_fields__ if name != "figures"}
        return cls(**(values | about))

    @classmethod
    def of_rounds(cls, rounds: Sequence[Measurement], more: dict[str, float], **about: object) -> Self:
        """Make a run of its rounds, at least one; `more` are figures beside those of the rounds."""
        middle = sorted(rounds, key=lambda one: one.outcome.rate)[len(rounds) // 2]
        made = cls.of(middle, rounds=list(rounds), **about)
        made.figures |= more
        return made

    def values(self, figure: str) -> list[float]:
        """Return a figure of each round, or the only one if it is not measured in rounds; empty if there is none."""
        found = [one.figures[figure] for one in self.rounds if figure in one.figures]
        return found or [value for name, value in self.figures.items() if name == figure]

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the rounds; None if there is none."""
        values = self.values(figure)
        return median(values) if values else None

    def ratios(self, base: "Run", figure: str) -> list[float]:
        """Divide a figure by that of another run, round by round, so that noise in a whole round cancels out."""
        return [one / other for one, other in zip(self.values(figure), base.values(figure), strict=False) if other]

    @property
    def load(self) -> str:
        """Describe the load. Overload depends on the measured peak, so it is named after its phase."""
        if self.overload:
            return self.overload.phase
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.clients} client{'' if self.clients == 1 else 's'}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Key of comparable runs."""
        return self.contestant, self.mode, self.model, self.load

    def _figures(self) -> dict[str, float]:
        numbers = super()._figures()
        if self.rate is not None:
            numbers["sent late p99"] = self.outcome.delay_p99
        if self.overload:
            numbers |= {"goodput": self.outcome.goodput} | self.overload.figures()
        return numbers
