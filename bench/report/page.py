"""One HTML page of one or more records, without scripts or downloads: their text, and charts in the colours of `page.css`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from bench.report.measurements import Run
from bench.report.records import Record
from bench.report.text import number, overview

_STYLE = Path(__file__).with_name("page.css")
_COLOURS = 8
"""Number of colours in the style sheet."""
_WIDTH, _HEIGHT = 900, 300
_NAMES, _SERVERS, _BARS, _LINE = 10, 175, 245, 17  # of a chart of shares, in pixels

Curves = Mapping[str, Sequence[tuple[float, float]]]
Shares: TypeAlias = tuple[str, Sequence[int], str]
"""A bar: its name, its parts, and what is written behind it."""


def page(records: Sequence[tuple[str, Record]]) -> str:
    """Draw the page of several records, given with file names: what each says, and the runs of all by experiment."""
    sections = [_section(name, _about(record), *_texts(record)) for name, record in records]
    runs = sorted(((file, run) for file, record in records for run in record.runs), key=lambda pair: pair[1].mode)
    sections += [_section(mode, *_charts(_name(list(group)))) for mode, group in groupby(runs, key=lambda pair: pair[1].mode)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Nereid: bench</title>'
    style = f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    body = f"<h1>Nereid: bench</h1>{''.join(sections)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'


def draw_shares(title: str, kinds: Mapping[str, int], groups: Mapping[str, Sequence[Shares]]) -> str:
    """Draw an SVG file of bars that are equally long, in groups; `kinds` are the names of the parts, and their colours."""
    full, x, y, shapes = _WIDTH - _BARS - 175, float(_NAMES), 50, [_text(_NAMES, 20, title, "ink")]
    for kind, colour in kinds.items():
        shapes += [_bar(x, 32, 11, colour), _text(x + 16, 42, kind)]
        x += 40 + 6 * len(kind)
    for name, rows in groups.items():
        shapes.append(_text(_NAMES, y + 25, name, "ink"))
        for bar, parts, note in rows:
            x, y = float(_BARS), y + _LINE
            shapes += [_text(_SERVERS, y + 8, bar), _text(_BARS + full + 10, y + 8, note)]
            for part, colour in zip(parts, kinds.values(), strict=True):
                shapes.append(_bar(x, y - 2, width := full * part / max(1, sum(parts)), colour))
                x += width
        y += 12
    theme = _STYLE.read_text(encoding="utf-8").partition("body")[0]
    style = f"<style>{theme}text {{ font: 13px system-ui, sans-serif; fill: var(--soft); }} .ink {{ fill: var(--ink); }}</style>"
    size = f'width="{_WIDTH}" height="{y + 10}" viewBox="0 0 {_WIDTH} {y + 10}"'
    lines = [style, '<rect width="100%" height="100%" rx="8" fill="var(--card)"/>', *shapes]
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{chr(10).join(lines)}\n</svg>\n'


def _text(x: float, y: float, text: str, style: str = "soft") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: int) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="11" fill="var(--c{colour})"/>'


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
    for figure in ("requests/s", "p50", "p99", "cpu gateway"):
        yield _draw_bars(figure, {name: value for name, run in runs.items() if (value := run.median(figure)) is not None})
    if answered := {name: _latencies(run) for name, run in runs.items() if run.outcome.histogram.total_count}:
        marks = {float(nines): f"{100 - 100 / 10**nines:g} %" for nines in range(1, 6)}
        yield _draw_curves("latency, ms, over the share of answers", answered, marks, lambda power: number(10**power))
    for name, run in runs.items():
        if run.overload and run.overload.memory:
            workers = enumerate(run.overload.memory, 1)
            curves = {f"worker {place}": list(zip(one.seconds, one.resident_mib, strict=True)) for place, one in workers}
            yield _draw_curves(f"resident memory, MiB, over seconds: {name}", curves)


def _latencies(run: Run) -> list[tuple[float, float]]:
    """Return points of logarithms (1 / share of slower responses, milliseconds), as far as there are enough responses."""
    decades = math.log10(max(run.outcome.histogram.total_count, 10))
    steps = [decades * step / 80 for step in range(81)]
    return [(step, math.log10(max(run.outcome.percentile(100 - 100 / 10**step), 1e-3))) for step in steps]


def _draw_bars(title: str, bars: Mapping[str, float]) -> str:
    """Draw bars below each other, in the order of their names."""
    most = max(bars.values(), default=0) or 1
    rows = "".join(
        f'<tr><td>{escape(name)}<td>{number(value)}<td class="bar"><div style="width:{100 * value / most:.1f}%"></div>'
        for name, value in bars.items()
    )
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def _draw_curves(
    title: str, curves: Curves, marks: Mapping[float, str] = MappingProxyType({}), show: Callable[[float], str] = number
) -> str:
    """Draw curves in one frame, with lines at the marks; the caption shows the smallest and the largest value."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    across, up = _WIDTH / ((right - left) or 1), _HEIGHT / ((high - low) or 1)
    lines = "".join(
        f'<polyline stroke="var(--c{place % _COLOURS})" points="'
        f'{" ".join(f"{(x - left) * across:.1f},{_HEIGHT - (y - low) * up:.1f}" for x, y in curve)}"/>'
        for place, curve in enumerate(curves.values())
    )
    lines += "".join(
        f'<path d="M{(at - left) * across:.1f},0 v{_HEIGHT}"/><text x="{(at - left) * across + 4:.1f}" y="12">{escape(text)}</text>'
        for at, text in marks.items()
        if left <= at <= right
    )
    names = ", ".join(f'<b style="color:var(--c{place % _COLOURS})">{escape(name)}</b>' for place, name in enumerate(curves))
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{lines}</svg>'
    return f"<figure>{svg}<figcaption>{escape(title)}: {show(low)} to {show(high)}; {names}</figcaption></figure>"
