"""What is measured of a server under a load."""

import msgspec

from bench.load.outcome import Outcome

PERCENTILES = (50, 90, 95, 99)
KINDS = ("gateway", "triton", "stubs", "client")
"""Kinds of processes whose CPU time is measured: the server, Triton, the processes of Triton's models, the load driver."""
UNKNOWN_MODEL = "-"
"""Stands for the model where neither the answers nor the command line name one."""


class TritonUse(msgspec.Struct, frozen=True):
    """What one model did during a run, in all Tritons together."""

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
    images_by_triton: list[int] = []
    """Images that each Triton has processed."""
    calls: dict[str, int] = {}
    """Calls that the gateway has made to Triton, by the number of images in them: `1`, `2`, `3-4`, as its metrics count them."""
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
