"""Runs as text for a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from bench.load.outcome import Outcome
from bench.report.machine import Machine, Server
from bench.report.measurements import PERCENTILES, Run

_BATCHES_SHOWN = 6

_OVERVIEW = {
    "requests/s": "requests/s",
    "mean": "mean",
    **{f"p{percent}": f"p{percent}" for percent in PERCENTILES},
    "max": "max",
    "errors %": "errors %",
    "batch": "mean batch",
    "queue": "queue",
    "gateway": "cpu gateway",
    "Triton": "cpu triton",
    "stubs": "cpu stubs",
}
"""Columns of an overview and the figures in them."""


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


def overview(runs: Iterable[Run]) -> str:
    """Format a table of several runs."""
    runs = list(runs)
    rows = [["load", *_OVERVIEW]]
    rows += [[run.load, *(number(run.figures.get(figure)) for figure in _OVERVIEW.values())] for run in runs]
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    notes = [f"{run.load}: {responses(run.outcome)}" for run in runs if run.outcome.failed]
    notes += [f"{run.load}: Server-Timing {_milliseconds(run.outcome.stages)}" for run in runs if run.outcome.stages]
    notes += sorted({run.triton_note for run in runs if run.triton_note})
    return "\n".join([table(rows), f"{models}; times in ms; gateway, Triton, stubs: CPU per request", *notes])


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


def responses(outcome: Outcome) -> str:
    """List the number of responses by status, with the codes of errors."""
    codes = {status: f" ({', '.join(found)})" for status, found in outcome.codes.items()}
    return ", ".join(f"{status}: {count:,}{codes.get(status, '')}" for status, count in outcome.statuses.items())


def number(value: float | None) -> str:
    """Format a number with three significant digits, or all digits of a larger one; None as a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def _milliseconds(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items()) + " ms" if values else ""


def _triton(run: Run) -> str:
    use = run.triton
    if use is None:
        return f"- ({run.triton_note})"
    most_common = sorted(use.batches.items(), key=lambda item: -item[1])[:_BATCHES_SHOWN]
    sizes = ", ".join(f"{size}: {count:,}" for size, count in sorted(most_common, key=lambda item: int(item[0])))
    return f"mean batch {use.mean_batch:.2f} ({sizes}), queue {number(use.queue_ms)} ms, compute {number(use.compute_ms)} ms"
