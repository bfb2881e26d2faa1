"""Measurements of a server under load."""

import msgspec

from bench.load.outcome import Outcome

PERCENTILES = (50, 90, 95, 99)
KINDS = ("gateway", "triton", "stubs", "client")
"""Kinds of processes whose CPU time is measured: the server, Triton, the processes of Triton's models, the load driver."""
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
    """CPU time per request by kind of process, for processes on this machine."""
    triton: TritonUse | None = None
    triton_note: str = ""
    """The reason if `triton` is None."""
    figures: dict[str, float] = {}
    """The main figures by name, for programs that cannot read HDR histograms."""

    def __post_init__(self) -> None:
        self.figures = self.figures or self._figures()

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
        if self.triton:
            numbers |= {"mean batch": self.triton.mean_batch, "queue": self.triton.queue_ms}
        numbers |= {f"stage {name}": value for name, value in outcome.stages.items()}
        return {name: round(value, 4) for name, value in numbers.items()}


class WorkerMemory(msgspec.Struct, frozen=True):
    """The memory of one worker over time."""

    seconds: list[float]
    """Times of the samples since the start of the load."""
    resident_mib: list[float]
    """Memory including shared memory."""
    proportional_mib: list[float]
    """Memory including its proportional part of shared memory."""


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
    """A single measurement."""

    contestant: str
    """Name of the server."""
    mode: str
    """Name of the experiment."""
    model: str
    """Name of the model."""
    clients: int | None = None
    rate: float | None = None
    """Requests per second, if the load had a constant rate."""
    overload: Overload | None = None
    rounds: list[Measurement] = []
    """The rounds that this one stands for; empty if it was measured once."""

    def values(self, figure: str) -> list[float]:
        """Return a figure of each round, or the only one if it is not measured in rounds; empty if there is none."""
        found = [one.figures[figure] for one in self.rounds if figure in one.figures]
        return found or [value for name, value in self.figures.items() if name == figure]

    @property
    def load(self) -> str:
        """Describe the load. Overload depends on the measured peak, so it is named after its phase."""
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
        """Key of comparable runs."""
        return self.contestant, self.mode, self.model, self.load
