"""Capacity by GPU, from the records of `bench gpu` in bench/results."""

from pathlib import Path

from bench.report.gpu import GpuRecord, load_gpu_record
from bench.report.text import number

_RESULTS = Path(__file__).parents[3] / "bench" / "results"
_GPUS = ("T4", "L4", "A10G", "A100", "H100", "H200", "RTX 4090")
_HEAD = (
    *("GPU", "images/s of one Triton", "of what the GPU can do", "p99 at half of it, ms", "cores of the API at half of it"),
    *("F1 of FP16", "date, commit"),
)


def render() -> str:
    """Draw a row for each record, and one for each GPU without any."""
    records = [load_gpu_record(path) for path in sorted(_RESULTS.glob("*.json"))]
    unknown = [name for name in _GPUS if not any(f" {name} " in f" {record.gpu} " for record in records)]
    rows = [_HEAD, ["---"] * len(_HEAD), *map(_row, records), *([name, *["rehearsed"] * (len(_HEAD) - 1)] for name in unknown)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(record: GpuRecord) -> list[str]:
    best = record.best
    if best is None:
        raise ValueError(f"the record of {record.gpu} has no images/s")
    half = next(run for run in record.runs if run.rate and run.contestant == best.contestant)
    cores = half.cpu_ms["gateway"] * half.outcome.requests / half.outcome.seconds / 1e3 if "gateway" in half.cpu_ms else None
    return [
        f"{record.gpu}, {record.machine.processor}, {record.machine.cores} cores",
        f"{number(best.outcome.rate)} (`{best.contestant}`, {best.load})",
        "-" if record.share is None else f"{record.share:.0%}",
        number(half.outcome.percentile(99)),
        number(cores),
        "-" if record.f1 is None else f"{record.f1:.4f}",
        f"{record.when[:10]}, {record.commit or 'unknown'}",
    ]
