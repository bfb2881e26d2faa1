"""The part of a page about overload."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from bench.report.charts import Line, draw_lines, linear_axis, log_axis
from bench.report.html import row, section, table
from bench.report.measurements import Overload, Run
from bench.report.overload_text import COLUMNS
from bench.report.records import Record
from bench.report.svg import colour

Measured = tuple[str, Run, Overload]
"""Name of a server, its run, and the overload measurements of the run."""


def overload_sections(records: Sequence[tuple[str, Record]]) -> list[str]:
    """Draw the overload runs of several records, given with file names; one section per model."""
    measured = [
        (run.contestant if len(records) == 1 else f"{run.contestant}, {file}", run, run.overload)
        for file, record in records
        for run in record.runs
        if run.overload
    ]
    measured.sort(key=lambda one: one[1].model)
    return [_section(model, list(group)) for model, group in groupby(measured, key=lambda one: one[1].model)]


def _section(model: str, measured: Sequence[Measured]) -> str:
    text = (
        "Times in milliseconds, from when a request was due. Rejections are 429 and 503. CPU time per request. Memory of the"
        " largest worker, MiB. Recovery: median latency of a single client after the load, divided by that before it."
    )
    rows = [
        row(name, overload.phase, [(run.figures.get(figure), False) for figure in COLUMNS.values()])
        for name, run, overload in measured
    ]
    content = table(["", "phase", *COLUMNS], rows) + _over_load(measured) + _memory(measured)
    return section(f"Overload: {model}", text, content)


def _over_load(measured: Sequence[Measured]) -> str:
    """Draw goodput and p99 over the offered load, without closed loops."""
    paced = sorted((one for one in measured if one[1].rate or not one[2].memory), key=lambda one: one[2].offered)
    if not paced:
        return ""
    offered = log_axis([overload.offered for _, _, overload in paced], "requests/s offered")
    rates = _lines([(name, overload.offered, run.outcome.goodput) for name, run, overload in paced])
    tails = _lines([(name, overload.offered, run.outcome.percentile(99)) for name, run, overload in paced if run.outcome.correct])
    colours = {line.name: colour(place) for place, line in enumerate(rates)}
    up = linear_axis(max(y for line in rates for _, y in line.points), "correct answers/s")
    content = f"<h3>Goodput over offered load</h3>{draw_lines(rates, offered, up, colours, dots=True)}"
    if tails:
        up = log_axis([y for line in tails for _, y in line.points], "p99 of correct answers, ms")
        content += f"<h3>p99 over offered load</h3>{draw_lines(tails, offered, up, colours, dots=True)}"
    return content


def _memory(measured: Sequence[Measured]) -> str:
    """Draw the memory of each worker over time, one plot per phase."""
    phases: dict[str, list[Line]] = {}
    for name, _, overload in measured:
        for number, worker in enumerate(overload.memory, 1):
            if worker.seconds:
                points = list(zip(worker.seconds, worker.resident_mib, strict=True))
                phases.setdefault(overload.phase, []).append(Line(f"{name} {number}", points))
    return "".join(f"<h3>Memory over time: {escape(phase)}</h3>{_draw_memory(lines)}" for phase, lines in phases.items())


def _draw_memory(lines: Sequence[Line]) -> str:
    across = linear_axis(max(line.points[-1][0] for line in lines), "seconds since the load began")
    up = linear_axis(max(y for line in lines for _, y in line.points), "resident MiB of each worker")
    return draw_lines(lines, across, up, {line.name: colour(place) for place, line in enumerate(lines)})


def _lines(points: Sequence[tuple[str, float, float]]) -> list[Line]:
    """Collect points by the name of their curve."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in points:
        curves.setdefault(name, []).append((x, y))
    return [Line(name, values) for name, values in curves.items()]
