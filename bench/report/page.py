"""One HTML page of one or more records, without scripts or downloads: text, and charts in the colours of `page.css`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pygal
from pygal.style import Style

from bench.report.measurements import Run
from bench.report.records import Record
from bench.report.text import overview

_PAGE_STYLE = Path(__file__).with_name("page.css")
_COLOURS = 8
"""Number of colours in the style sheet."""
_STYLE = Style(
    background="transparent",
    plot_background="transparent",
    foreground="var(--soft)",
    foreground_strong="var(--ink)",
    foreground_subtle="var(--grid)",
    guide_stroke_color="var(--grid)",
    major_guide_stroke_color="var(--grid)",
    colors=tuple(f"var(--c{place})" for place in range(_COLOURS)),
    font_family="inherit",
)
_BAR_HEIGHT, _HEIGHT, _WIDTH = 26, 340, 900
_PERCENTILES = (0, 50, 90, 99, 99.9, 99.99)

Curves = Mapping[str, Sequence[tuple[float, float]]]


def page(records: Sequence[tuple[str, Record]]) -> str:
    """Draw the page of several records, given with file names: what each says, and the runs of all by experiment."""
    sections = [_section(name, _about(record), *_texts(record)) for name, record in records]
    runs = sorted(((file, run) for file, record in records for run in record.runs), key=lambda pair: pair[1].mode)
    sections += [_section(mode, *_charts(_name(list(group)))) for mode, group in groupby(runs, key=lambda pair: pair[1].mode)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Nereid: bench</title>'
    style = f"<style>\n{_PAGE_STYLE.read_text(encoding='utf-8')}</style>"
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


def _name(runs: Sequence[tuple[str, Run]]) -> dict[str, Run]:
    """Name runs, given with their files, by what distinguishes them."""
    described = [((run.contestant, file, run.model, run.load), run) for file, run in runs]
    telling = [place for place in range(4) if len({parts[place] for parts, _ in described}) > 1] or [0]
    named: dict[str, Run] = {}
    for parts, run in described:
        name = ", ".join(parts[place] for place in telling)
        named[name if name not in named else f"{name} ({len(named)})"] = run
    return named


def _charts(runs: Mapping[str, Run]) -> Iterator[str]:
    """Draw the runs of an experiment, by their names."""
    yield _draw_bars("Requests per second", {name: {"requests/s": run.outcome.rate} for name, run in runs.items()})
    if answered := {name: _latencies(run) for name, run in runs.items() if run.outcome.histogram.total_count}:
        ticks = {f"{percent:g}": 100 / (100 - percent) for percent in _PERCENTILES}
        yield _draw_curves("Latency, ms", answered, "percentile of the answers", ticks)
    yield _draw_bars("CPU per request by process, ms", {name: run.cpu_ms for name, run in runs.items()})
    for name, run in runs.items():
        if run.overload and run.overload.memory:
            workers = enumerate(run.overload.memory, 1)
            curves = {f"worker {number}": list(zip(one.seconds, one.resident_mib, strict=True)) for number, one in workers}
            yield _draw_curves(f"Resident memory, MiB: {name}", curves, "seconds since the load began")


def _latencies(run: Run) -> list[tuple[float, float]]:
    """Return points of (1 / share of slower responses, milliseconds), as far as there are enough responses."""
    decades = math.log10(max(run.outcome.histogram.total_count, 10))
    steps = [10 ** (decades * step / 80) for step in range(81)]
    return [(step, max(run.outcome.percentile(100 - 100 / step), 1e-3)) for step in steps]


def _draw_curves(title: str, curves: Curves, across: str, ticks: Mapping[str, float] | None = None) -> str:
    """Draw curves over the axis `across`; with ticks, both axes are logarithmic."""
    labels = ticks and [{"label": label, "value": value} for label, value in ticks.items()]
    chart = pygal.XY(**_options(title, _HEIGHT), x_title=across, x_labels=labels, logarithmic=bool(ticks), show_dots=not ticks)
    for name, points in curves.items():
        chart.add(name, points)
    return _render(chart)


def _draw_bars(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Draw bars of stacked parts below each other, the first one on top."""
    names = [*bars][::-1]
    chart = pygal.HorizontalStackedBar(**_options(title, 110 + _BAR_HEIGHT * len(bars)), x_labels=names)
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        chart.add(part, [bars[name].get(part) for name in names])
    return _render(chart)


def _options(title: str, height: int) -> dict[str, Any]:
    return {"title": title, "height": height, "width": _WIDTH, "style": _STYLE, "js": (), "truncate_legend": -1}


def _render(chart: Any) -> str:  # noqa: ANN401 - pygal has no types
    chart.add_xml_filter(_without_scripts)
    return str(chart.render(is_unicode=True, disable_xml_declaration=True))


def _without_scripts(root: Element) -> Element:
    """Remove what shows tooltips."""
    for parent in list(root.iter()):
        for script in parent.findall("script"):
            parent.remove(script)
    return root
