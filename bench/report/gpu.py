"""The record of a GPU: what callers get of what it can do."""

from pathlib import Path
from typing import Annotated, cast

from msgspec import Meta

from bench.report.measurements import Run
from bench.report.records import Record, load_record
from bench.report.text import number, overview


class GpuRecord(Record, kw_only=True, forbid_unknown_fields=True):
    """One session of `bench gpu`."""

    gpu: Annotated[str, Meta(min_length=1)]
    """Its name."""
    limits: dict[str, Annotated[float, Meta(gt=0)]]
    """Images/s without the gateway: of `onnxruntime` by CUDA alone, and of a `triton` that gets full batches."""
    f1: Annotated[float, Meta(ge=0, le=1)] | None
    """Of the boxes that Triton finds, in FP16 if it has such a graph, against those of the network in FP32."""
    failures: dict[str, str]
    """Why parts have no result, by their names."""

    @property
    def best(self) -> Run | None:
        """The run with the most images/s."""
        return max((run for run in self.runs if run.clients), key=lambda run: run.outcome.rate, default=None)

    @property
    def share(self) -> float | None:
        """The part of the highest limit that the best run has reached."""
        return self.best.outcome.rate / max(self.limits.values()) if self.best and self.limits else None

    def __str__(self) -> str:
        lines = [f"{self.gpu}; {self.machine}; commit {self.commit or 'unknown'}, {self.when}"]
        lines += [f"{name} without the gateway: {number(rate)} images/s" for name, rate in self.limits.items()]
        lines += [f"F1 against FP32: {self.f1:.4f}"] if self.f1 is not None else []
        lines += [f"{name} has no result: {reason}" for name, reason in self.failures.items()]
        lines += [f"the most with it: {self.share:.0%} of that"] if self.share else []
        return "\n".join([*lines, overview(self.runs)])


def load_gpu_record(path: Path) -> GpuRecord:
    """Read the record of a GPU; errors as for `load_record`."""
    return cast("GpuRecord", load_record(path, GpuRecord))
