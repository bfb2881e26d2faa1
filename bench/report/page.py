"""One HTML page of one or more records, without scripts or downloads: their text, and charts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from bench.report.charts import draw_bars, draw_curves
from bench.report.measurements import Run
from bench.report.records import Record
from bench.report.text import overview

_STYLE = Path(__file__).with_name("page.css")
_PERCENTILES = {"0": 0.0, "50": 50.0, "90": 90.0, "99": 99.0, "99.9": 99.9, "99.99": 99.99}


def page(records: Sequence[tuple[str, Record]]) -> str:
    """Draw the page of several records, given with file names: what each says, and the runs of all by experiment."""
    sections = [_section(name, _about(record), *_texts(record)) for name, record in records]
    runs = sorted(((file, run) for file, record in records for run in record.runs), key=lambda pair: pair[1].mode)
    sections += [_section(mode, *_charts(_name(list(group)))) for mode, group in groupby(runs, key=lambda pair: pair[1].mode)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Nereid: bench</title>'
    style = f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    body = f"<h1>Nereid: bench</h1>{''.join(sections)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _about(record: Record) -> str:
    summary = f"{record.when}, commit {record.commit or '?'}, {record.machine}"
    if record.server:
        summary += f"; server: {record.server}"
    details = ", ".join(f"{key} {value}" for key, value in (record.versions | record.settings).items())
    return f"<p>{escape(summary)}</p><details><summary>versions and settings</summary>{escape(details)}</details>"


def _texts(record: Record) -> Iterator[str]:
    """Describe a record as on the terminal."""
    for mode, group in groupby(record.runs, key=lambda run: run.mode):
        yield f"<h3>{escape(mode)}</h3><pre>{escape(overview(list(group)))}</pre>"


def _name(runs: Sequence[tuple[str, Run]]) -> dict[str, tuple[str, Run]]:
    """Name runs, given with their files, by what distinguishes them; the name of a curve leaves out the load."""
    described = [((run.contestant, file, run.model, run.load), run) for file, run in runs]
    telling = [place for place in range(4) if len({parts[place] for parts, _ in described}) > 1] or [0]
    named: dict[str, tuple[str, Run]] = {}
    for parts, run in described:
        name = ", ".join(parts[place] for place in telling)
        curve = ", ".join(parts[place] for place in telling if place < len(parts) - 1) or parts[0]
        named[name if name not in named else f"{name} ({len(named)})"] = curve, run
    return named


def _charts(named: Mapping[str, tuple[str, Run]]) -> Iterator[str]:
    """Draw the runs of an experiment, by their names and the names of their curves."""
    runs = {name: run for name, (_, run) in named.items()}
    yield from _over_load(list(named.values()))
    yield draw_bars("Requests per second", {name: {"requests/s": run.outcome.rate} for name, run in runs.items()})
    if answered := {name: _latencies(run) for name, run in runs.items() if run.outcome.correct}:
        ticks = {label: 100 / (100 - percent) for label, percent in _PERCENTILES.items()}
        yield draw_curves("Latency, ms", answered, "percentile of the answers", ticks=ticks)
    yield draw_bars("CPU per request by process, ms", {name: run.cpu_ms for name, run in runs.items()})
    if staged := {name: _stages(run) for name, run in runs.items() if run.outcome.stages}:
        yield draw_bars("Mean time of each stage, ms", staged)
    for name, run in runs.items():
        if run.overload and run.overload.memory:
            workers = enumerate(run.overload.memory, 1)
            curves = {f"worker {number}": list(zip(one.seconds, one.resident_mib, strict=True)) for number, one in workers}
            yield draw_curves(f"Resident memory, MiB: {name}", curves, "seconds since the load began")


def _over_load(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """Draw throughput and p99 over the load that was offered, or over the clients, where there is more than one."""
    if any(run.overload for _, run in runs):
        across, figure = "requests/s offered", "goodput"
        # Where clients wait for responses, only the peak has an offered load.
        points = [(name, one.overload.offered, one) for name, one in runs if one.overload and (one.rate or not one.overload.memory)]
    else:
        across, figure = "clients", "requests/s"
        points = [(name, float(run.clients or 0), run) for name, run in runs]
    if len({load for _, load, _ in points}) > 1:
        for figure_, unit in ((figure, "/s"), ("p99", ", ms")):
            curves: dict[str, list[tuple[float, float]]] = {}
            for name, load, run in sorted(points, key=lambda point: point[1]):
                curves.setdefault(name, []).append((load, run.figures[figure_]))
            yield draw_curves(f"{figure_.removesuffix('/s')}{unit}", curves, across)


def _latencies(run: Run) -> list[tuple[float, float]]:
    """Return points of (1 / share of slower responses, milliseconds), as far as there are enough responses."""
    decades = math.log10(max(run.outcome.histogram.total_count, 10))
    steps = [10 ** (decades * step / 80) for step in range(81)]
    return [(step, max(run.outcome.percentile(100 - 100 / step), 1e-3)) for step in steps]


def _stages(run: Run) -> dict[str, float]:
    """Return the stages in the order of the server, and the rest of the total."""
    stages = {name: value for name, value in run.outcome.stages.items() if name != "total"}
    return stages | {"rest": max(0.0, run.outcome.stages.get("total", 0.0) - sum(stages.values()))}
