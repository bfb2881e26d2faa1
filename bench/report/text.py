"""Runs as text for a terminal: one in detail, or several in a table with their ratios."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from bench.load.driver import BUSY_SHARE
from bench.load.outcome import Outcome
from bench.report.measurements import PERCENTILES, Run
from bench.report.records import Machine, Server

COMPARED = {"throughput": "requests/s", "gateway's CPU": "cpu gateway", "p50": "p50", "p99": "p99"}
"""Titles of the ratios between runs, and their figures."""

_BATCHES_SHOWN = 6
_COLUMNS = (
    *("offered/s", "goodput", "requests/s", "mean", *(f"p{percent}" for percent in PERCENTILES), "max", "outside", "errors %"),
    *("429 %", "503 %", "mean batch", "queue", "sent late p99", "rejected p50", "rejected p99"),
    *("cpu gateway", "cpu triton", "cpu stubs", "cpu client", "model's CPU %", "worker MiB", "unshared MiB"),
    *("server MiB", "start s", "resident MiB before", "resident MiB peak", "resident MiB after", "recovery"),
)
"""Figures in the columns of a table, which has those that one of its runs has."""
_NOTES = {
    "": "times in ms; cpu: per request, of the gateway, of Triton, of the processes of its models and of the client",
    "outside": "outside: median of what is neither decoding nor Triton, as the client sees it",
    "goodput": "p50 to max: of correct answers and of requests given up, from when they were due; rejected: of 429 and 503",
    "sent late p99": "sent late p99: 99 of 100 requests were sent within this time",
    "worker MiB": "MiB: memory of the largest worker; unshared: the part that no other process uses",
    "server MiB": "server MiB: all processes, without a Triton beside them; start s: seconds until the server was ready",
    "recovery": "recovery: median latency of a single client after the load, divided by that before it; a dash: no correct answer",
}
"""What a figure in the table means."""


def sheet(run: Run) -> str:
    """Describe one run in detail."""
    outcome = run.outcome
    lines = [
        ("load", f"{run.load} for {outcome.seconds:.1f} s, {run.model}"),
        ("requests", f"{outcome.requests:,}"),
        ("requests/s", number(outcome.rate)),
        ("mean", f"{number(outcome.mean)} ms"),
        *((f"p{percent}", f"{number(outcome.percentile(percent))} ms") for percent in PERCENTILES),
        ("max", f"{number(outcome.max)} ms"),
        ("error rate", f"{outcome.failed:.2%}"),
        ("responses", responses(outcome)),
        ("Server-Timing", _milliseconds(outcome.stages) or "- (the server sends none)"),
        ("Triton", _triton(run)),
        ("CPU per request", _milliseconds(run.cpu_ms)),
        ("load driver", f"{outcome.driver_cpu:.0%} of a core"),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in lines)


def places(machine: Machine, server: Server) -> str:
    """Say where the load came from, and where the server was."""
    return f"{'client':<16} {machine}\n{'server':<16} {server}"


def overview(runs: Sequence[Run]) -> str:
    """Format a table of runs, which have their medians in it, the ratios to their bases, and remarks."""
    figures = [figure for figure in _COLUMNS if any(run.values(figure) for run in runs)]
    if "outside" in figures and any(run.clients != 1 for run in runs):  # who wait for each other
        figures.remove("outside")
    about = {"server": [run.contestant for run in runs], "load": [run.load for run in runs], "model": [run.model for run in runs]}
    about = {name: cells for name, cells in about.items() if len({*cells}) > 1 or name == "server"}
    rows = [[*about, *figures]]
    for place, run in enumerate(runs):
        rows.append([*(cells[place] for cells in about.values()), *(number(run.median(figure)) for figure in figures)])
    notes = [note for figure, note in _NOTES.items() if not figure or figure in figures]
    return "\n".join([table(rows), *notes, *_ratios(runs), *_remarks(runs)])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right. The first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def spread(values: Sequence[float]) -> str:
    """Describe ratios by their median, the smallest and the largest."""
    return f"{median(values):.2f} x ({min(values):.2f}..{max(values):.2f})" if values else "-"


def responses(outcome: Outcome) -> str:
    """List the number of responses by status, with the codes of errors."""
    codes = {status: f" ({', '.join(found)})" for status, found in outcome.codes.items()}
    return ", ".join(f"{status}: {count:,}{codes.get(status, '')}" for status, count in outcome.statuses.items())


def number(value: float | None) -> str:
    """Format a number with three significant digits, or all digits of a larger one; None as a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def _ratios(runs: Sequence[Run]) -> Iterator[str]:
    if any(run.bases for run in runs):
        yield "median of the rounds' ratios (min..max):"
    for run in runs:
        for base in (other for other in runs if other.contestant in run.bases and other.load == run.load):
            parts = [f"{what} {spread(run.ratios(base, figure))}" for what, figure in COMPARED.items() if run.values(figure)]
            yield f"  {run.contestant} / {base.contestant}{_load(run, runs)}: {', '.join(parts)}"


def _remarks(runs: Sequence[Run]) -> Iterator[str]:
    """Return remarks on the table."""
    for run in runs:
        outcomes = [one.outcome for one in run.rounds or [run]]
        name = f"{run.contestant}{_load(run, runs)}"
        if outcomes[0].stages and not run.rounds:
            yield f"{name}: Server-Timing {_milliseconds(outcomes[0].stages)}"
        if failed := next((outcome for outcome in outcomes if outcome.failed), None):
            yield f"{name}: {responses(failed)}"
        if any(outcome.driver_cpu > BUSY_SHARE for outcome in outcomes):
            yield f"{name}: the client used more than {BUSY_SHARE:.0%} of a core; the server may be faster than shown"
    yield from sorted({one.triton_note for run in runs for one in run.rounds or [run] if one.triton_note})


def _load(run: Run, runs: Sequence[Run]) -> str:
    return f", {run.load}" if len({one.load for one in runs}) > 1 else ""


def _milliseconds(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items()) + " ms" if values else ""


def _triton(run: Run) -> str:
    use = run.triton
    if use is None:
        return f"- ({run.triton_note})"
    most_common = sorted(use.batches.items(), key=lambda item: -item[1])[:_BATCHES_SHOWN]
    sizes = ", ".join(f"{size}: {count:,}" for size, count in sorted(most_common, key=lambda item: int(item[0])))
    return f"mean batch {use.mean_batch:.2f} ({sizes}), queue {number(use.queue_ms)} ms, compute {number(use.compute_ms)} ms"
