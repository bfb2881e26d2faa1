"""One HTML page of one or more records: no scripts, nothing fetched, plots drawn by hand."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from bench import results
from bench.load import Outcome
from bench.results import Record, Run, TritonUse

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 30, 44
BAR, GAP = 22, 12
COLOURS = 8
LONG = 19
"""Letters of a name that fit beside a plot."""
NARROW = 26
"""Pixels in which no two labels fit."""
MARKS = {0: "0", 50: "50", 90: "90", 99: "99", 99.9: "99.9", 99.99: "99.99"}
STAGES = {"read": 3, "model": 4, "queue": 2, "decode": 1, "letterbox": 7, "infer": 0, "post": 6}
"""Those that Nereid reports, in order, with their colours: a stage looks the same in every plot."""
KINDS = ("gateway", "triton", "stubs", "client")
SHARED_SCALE = 25
"""How many times longer the longest bar may be before bars show shares instead."""

STYLE = """
:root { color-scheme: light dark; --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --faint: #898781;
  --grid: #e1e0d9; --axis: #c3c2b7; --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #eda100; --c4: #e87ba4; --c5: #008300;
  --c6: #4a3aa7; --c7: #e34948; --rest: #b5b4ad; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #fff; --soft: #c3c2b7; --faint: #898781;
  --grid: #2c2c2a; --axis: #383835; --c0: #3987e5; --c1: #d95926; --c2: #199e70; --c3: #c98500; --c4: #d55181; --c5: #008300;
  --c6: #9085e9; --c7: #e66767; --rest: #5d5c58; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 20px 64px; max-width: 980px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 0 0 2px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 0 0 10px; color: var(--soft); } details { color: var(--soft); margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 20px; margin: 18px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 4px 6px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.bad { color: var(--c7); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 6px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); }
svg .strong { fill: var(--ink); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--axis); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); stroke-width: 2; }
"""


class _Round(msgspec.Struct):
    """One round of `bench versus`: only what is drawn."""

    rate: float
    p50: float
    p99: float
    failed: float
    cpu_gateway: float
    cpu_triton: float
    cpu_stubs: float
    cpu_client: float
    outcome: Outcome
    triton: TritonUse | None = None

    @property
    def batch(self) -> float:
        return self.triton.mean_batch if self.triton else 0.0

    @property
    def queue(self) -> float:
        return self.triton.queue_ms if self.triton else 0.0


class _Entry(msgspec.Struct):
    name: str
    model: str
    rounds: list[_Round]
    note: str = ""


class _Contest(msgspec.Struct):
    title: str
    clients: int
    entries: list[_Entry]
    workers: int = 0
    left_out: dict[str, str] = {}


class Line(NamedTuple):
    """One curve: its name and its points, in the units of the axes."""

    name: str
    points: list[tuple[float, float]]


class Bar(NamedTuple):
    """One stacked bar; `marks` are single measurements, drawn as dots."""

    name: str
    parts: dict[str, float]
    said: str
    marks: Sequence[float] = ()


class Axis(NamedTuple):
    """A logarithmic scale or a linear one, with the places of its ticks and what they say."""

    low: float
    high: float
    ticks: dict[float, str]
    title: str
    is_log: bool

    def place(self, value: float) -> float:
        """Say where a value lies, 0 to 1."""
        if self.is_log:
            return (math.log10(max(value, self.low)) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def report(files: Sequence[Path], output: Path) -> int:
    """Write the page."""
    try:
        contents = [(file.stem, results.load(file)) for file in files]
        output.write_text(page(contents), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written: {output}")
    return 0


def page(records: Sequence[tuple[str, Record]]) -> str:
    """Draw everything there is. What `versus` has measured stands by itself, with all its rounds."""
    contests = {name: msgspec.convert(record.settings.get("contests", []), list[_Contest]) for name, record in records}
    runs, series = _named([(name, record) for name, record in records if not contests[name]])
    sections = [*_sections(runs, series), *(section for held in contests.values() for section in _contests(held))]
    about = "".join(_about(name, record) for name, record in records)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Nereid: bench</title>'
    body = f"<h1>Nereid: bench</h1>{about}{''.join(sections)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _named(records: Sequence[tuple[str, Record]]) -> tuple[dict[str, Run], dict[str, list[Run]]]:
    """Name runs by what tells them apart, and series of runs by what tells those apart that differ in more than their load."""
    told = [((run.contestant, file, run.model, run.load), run) for file, record in records for run in record.runs]
    telling = [place for place in range(4) if len({parts[place] for parts, _ in told}) > 1] or [3]
    runs: dict[str, Run] = {}
    series: dict[str, list[Run]] = {}
    for parts, run in told:
        name = ", ".join(parts[place] for place in telling)
        runs[name if name not in runs else f"{name} ({len(runs)})"] = run
        series.setdefault(", ".join(parts[place] for place in telling if place < 3) or parts[0], []).append(run)  # noqa: PLR2004
    return runs, series


def _about(name: str, record: Record) -> str:
    machine = record.machine
    said = f"{name}: {record.when}, commit {record.commit or '?'}, {machine.processor}, {machine.cores} cores, {machine.system}"
    more = ", ".join(f"{key} {value}" for key, value in (record.versions | record.settings).items() if key != "contests")
    return f"<p>{escape(said)}</p><details><summary>versions and settings</summary>{escape(more)}</details>"


def _sections(runs: Mapping[str, Run], series: Mapping[str, Sequence[Run]]) -> list[str]:
    if not runs:
        return []
    colours = {name: _colour(place) for place, name in enumerate(runs)}
    answered = [(name, run) for name, run in runs.items() if run.outcome.good]
    curves = [Line(name, _curve(run.outcome.latency)) for name, run in answered[:COLOURS]]
    sections = [_section("Numbers", "Times in milliseconds; CPU time per request, by process.", _numbers(runs))]
    if curves:
        text = "How long the slowest answers took: at 99, one of a hundred was slower than the curve. Both axes are logarithmic."
        text += f" The first {COLOURS} of {len(answered)} runs." if len(answered) > COLOURS else ""
        sections.append(_section("Latency", text, _latency(curves, colours)))
    sections += _over_clients(series)
    stages = [
        _stage_bar(name, run.outcome.stages, f"{results.number(run.outcome.mean)} ms")
        for name, run in runs.items()
        if run.outcome.stages
    ]
    if stages:
        text = "Where the server says a request's time goes (Server-Timing), mean; to the right, the mean the client saw."
        sections.append(_section("Stages", text, _bars(stages, _stage_colours(stages))))
    bars = [Bar(name, run.cpu_ms, f"{results.number(sum(run.cpu_ms.values()))} ms") for name, run in runs.items() if run.cpu_ms]
    if bars:
        text = "Processor time that one request cost, by whose it was."
        sections.append(_section("CPU per request", text, _bars(bars, {kind: _colour(place) for place, kind in enumerate(KINDS)})))
    batches = {name: run.triton.batches for name, run in runs.items() if run.triton and run.triton.batches}
    if batches:
        text = "How many requests Triton ran together: share of its executions by batch size."
        sections.append(_section("Batch sizes", text, "".join(_batches(name, sizes) for name, sizes in batches.items())))
    return sections


def _contests(contests: Sequence[_Contest]) -> list[str]:
    sections = []
    for contest in contests:
        entries = [entry for entry in contest.entries if entry.rounds]
        if not entries:
            continue
        base = [one.rate for one in entries[0].rounds]
        colours = {entry.name: _colour(place) for place, entry in enumerate(entries)}
        rates = []
        for entry in entries:
            rate = _median(entry, "rate")
            said = f"{results.number(rate)}/s" + (f", {_ratio(entry, base):.2f} x" if all(base) and entry is not entries[0] else "")
            rates.append(Bar(entry.name, {entry.name: rate}, said, [one.rate for one in entry.rounds]))
        parts = [f"<h3>Requests per second</h3>{_bars(rates, colours, legend=False)}"]
        lines = [
            Line(entry.name, _curve(*(one.outcome.latency for one in entry.rounds)))
            for entry in entries
            if entry.rounds[0].outcome.good
        ]
        if lines:
            parts.append(f"<h3>Latency</h3>{_latency(lines[:COLOURS], colours)}")
        costs = [Bar(entry.name, {kind: _median(entry, f"cpu_{kind}") for kind in KINDS}, "") for entry in entries]
        costs = [bar._replace(said=f"{results.number(sum(bar.parts.values()))} ms") for bar in costs]
        kinds = {kind: _colour(place) for place, kind in enumerate(KINDS)}
        parts.append(f"<h3>CPU per request</h3>{_bars(costs, kinds)}")
        timed = [
            _stage_bar(entry.name, _median_stages(entry), f"p50 {results.number(_median(entry, 'p50'))} ms")
            for entry in entries
            if entry.rounds[0].outcome.stages
        ]
        if timed:
            parts.append(f"<h3>Stages</h3>{_bars(timed, _stage_colours(timed))}")
        sizes = [Bar(entry.name, {entry.name: _median(entry, "batch")}, f"{_median(entry, 'batch'):.1f}") for entry in entries]
        if any(bar.parts[bar.name] for bar in sizes):
            parts.append(f"<h3>Mean batch</h3>{_bars(sizes, colours, legend=False)}")
            drawn = [_batches(entry.name, _summed(entry)) for entry in entries]
            parts.append(f"<h3>Share of Triton's executions by batch size</h3>{''.join(drawn)}")
        missing = "".join(f"<p>{escape(name)} was left out: {escape(why)}</p>" for name, why in contest.left_out.items())
        count = len(entries[0].rounds)
        text = f"Medians of {count} interleaved rounds, a dot for each; {contest.clients} clients, {contest.workers} workers each."
        sections.append(_section(contest.title, text, missing + _standings(entries) + "".join(parts)))
    return sections


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{content}</section>\n"


def _numbers(runs: Mapping[str, Run]) -> str:
    wanted = [
        "requests/s",
        "mean",
        "p50",
        "p90",
        "p95",
        "p99",
        "max",
        "errors %",
        "mean batch",
        "queue",
        *(f"cpu {k}" for k in KINDS),
    ]
    rows = []
    for name, run in runs.items():
        cells = [_cell(run.figures.get(figure), is_bad=figure == "errors %" and run.figures[figure] > 0) for figure in wanted]
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    return _table(["", *wanted], rows)


def _standings(entries: Sequence[_Entry]) -> str:
    wanted = {"requests/s": "rate", "p50": "p50", "p99": "p99", "errors %": "failed", "batch": "batch", "queue": "queue"}
    wanted |= {f"cpu {kind}": f"cpu_{kind}" for kind in KINDS}
    rows = []
    for entry in entries:
        values = {title: _median(entry, field) * (100 if field == "failed" else 1) for title, field in wanted.items()}
        cells = [_cell(value, is_bad=title == "errors %" and value > 0) for title, value in values.items()]
        rows.append(f'<tr><td title="{escape(entry.note)}">{escape(entry.name)}</td>{"".join(cells)}</tr>')
    return _table(["", *wanted], rows)


def _cell(value: float | None, *, is_bad: bool) -> str:
    return f"<td{' class=bad' if is_bad else ''}>{'-' if value is None else results.number(value)}</td>"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _curve(*encoded: str) -> list[tuple[float, float]]:
    """Give (1 / share of slower answers, milliseconds), as far as there were answers to know it."""
    histogram = results.merged(encoded)
    decades = math.log10(max(histogram.total_count, 10))
    steps = [10 ** (decades * step / 80) for step in range(81)]
    percents = [100 * (1 - 1 / step) for step in steps]
    values = histogram.get_percentile_to_value_dict(percents)
    return [(step, max(values[percent], 1) / 1e3) for step, percent in zip(steps, percents, strict=True)]


def _latency(lines: Sequence[Line], colours: Mapping[str, str]) -> str:
    most = max(point[0] for line in lines for point in line.points)
    ticks = {1 / (1 - percent / 100): text for percent, text in MARKS.items() if 1 / (1 - percent / 100) <= most * 1.001}
    across = Axis(1, most, ticks, "percentile of the answers", is_log=True)
    return _plot(lines, across, _log_axis([y for line in lines for _, y in line.points], "ms"), colours)


def _over_clients(series: Mapping[str, Sequence[Run]]) -> list[str]:
    """Draw throughput and p99 over clients for all that was asked with several numbers of them."""
    counted = {
        name: sorted((run for run in runs if run.clients), key=lambda run: run.clients or 0) for name, runs in series.items()
    }
    several = {name: runs for name, runs in counted.items() if len({run.clients for run in runs}) > 1}
    if not several:
        return []
    colours = {name: _colour(place) for place, name in enumerate(several)}
    rates = [Line(name, [(float(run.clients or 1), run.outcome.rate) for run in runs]) for name, runs in several.items()]
    tails = [Line(name, [(float(run.clients or 1), run.outcome.percentile(99)) for run in runs]) for name, runs in several.items()]
    counts = sorted({point[0] for line in rates for point in line.points})
    across = Axis(counts[0], counts[-1], {count: f"{count:g}" for count in counts}, "clients", is_log=True)
    high = _round_up(max(point[1] for line in rates for point in line.points))
    up = Axis(0, high, {high * part / 4: f"{high * part / 4:,g}" for part in range(5)}, "requests/s", is_log=False)
    tail = _log_axis([point[1] for line in tails for point in line.points], "p99, ms")
    text = "Right answers per second, and what 99 of 100 of them took at most."
    plots = _plot(rates, across, up, colours, dots=True) + _plot(tails, across, tail, colours, dots=True)
    return [_section("Throughput over clients", text, plots)]


def _log_axis(values: Sequence[float], title: str) -> Axis:
    low, high = min(values), max(values)
    steps = [factor * 10.0**decade for decade in range(-4, 6) for factor in (1, 2, 5)]
    low = max((step for step in steps if step <= low), default=steps[0])
    high = min((step for step in steps if step >= high and step > low), default=steps[-1])
    ticks = {step: f"{step:,g}" for step in steps if low <= step <= high}
    if len(ticks) > 8:  # noqa: PLR2004
        ticks = {step: text for step, text in ticks.items() if text.strip("0.") == "1" or text.startswith("1")}
    return Axis(low, high, ticks, title, is_log=True)


def _plot(lines: Sequence[Line], across: Axis, up: Axis, colours: Mapping[str, str], *, dots: bool = False) -> str:
    def x(value: float) -> float:
        return LEFT + across.place(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - up.place(value) * (HEIGHT - TOP - BOTTOM)

    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [_text(0, 12, up.title)]
    for value, text in up.ticks.items():
        parts += [_rule((LEFT, right), (y(value), y(value)), "grid"), _text(LEFT - 8, y(value) + 4, text, "end")]
    last = -math.inf
    for value, text in across.ticks.items():
        parts.append(_rule((x(value), x(value)), (floor, floor + 4), "axis"))
        if x(value) - last > NARROW:
            parts.append(_text(x(value), floor + 18, text, "middle"))
            last = x(value)
    parts += [_rule((LEFT, right), (floor, floor), "axis"), _text((LEFT + right) / 2, HEIGHT - 6, across.title, "middle")]
    for line in lines:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        colour = colours[line.name]
        parts.append(f'<polyline points="{points}" class="line" stroke="{colour}"><title>{escape(line.name)}</title></polyline>')
        for a, b in line.points if dots else []:
            parts.append(_dot(x(a), y(b), colour, f"{line.name}, {across.title} {a:g}: {results.number(b)} {up.title}"))
    for line, place in _spread(lines, y):
        parts.append(f'<g stroke="{colours[line.name]}">{_rule((right + 6, right + 16), (place, place), "line")}</g>')
        parts.append(_text(right + 21, place + 4, _short(line.name, LONG), "strong"))
    legend = _legend({line.name: colours[line.name] for line in lines}) if any(len(line.name) > LONG for line in lines) else ""
    return legend + _svg(HEIGHT, parts)


def _spread(lines: Sequence[Line], y: Callable[[float], float]) -> list[tuple[Line, float]]:
    """Place labels at the ends of their curves, so that none covers another."""
    placed: list[tuple[Line, float]] = []
    for line in sorted(lines, key=lambda line: y(line.points[-1][1])):
        place = y(line.points[-1][1])
        placed.append((line, max(place, placed[-1][1] + 16) if placed else place))
    over = max(0.0, placed[-1][1] - (HEIGHT - BOTTOM)) if placed else 0.0
    return [(line, place - over) for line, place in placed]


def _bars(bars: Sequence[Bar], colours: Mapping[str, str], *, legend: bool = True) -> str:
    totals = [max([sum(bar.parts.values()), *bar.marks]) for bar in bars]
    is_shared = len(bars) == 1 or not legend or max(totals) <= SHARED_SCALE * max(min(totals), 1e-9)
    labels = min(220, 20 + 7 * max(len(bar.name) for bar in bars))
    room = WIDTH - labels - 110
    parts = []
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        scale = room / ((max(totals) if is_shared else total) or 1)
        top, left = place * (BAR + GAP), float(labels)
        parts.append(_text(labels - 10, top + 15, _short(bar.name, 30), "end strong"))
        for name, value in bar.parts.items():
            colour, said = colours.get(name, "var(--rest)"), f"{bar.name}: {name} {results.number(value)}"
            parts.append(_rect((left, top), (value * scale - 1.5, BAR), colour, said))
            left += value * scale
        parts += [_dot(labels + mark * scale, top + BAR / 2, "var(--ink)", results.number(mark)) for mark in bar.marks]
        end = max([left, *(labels + mark * scale for mark in bar.marks)])
        parts.append(_text(end + 8, top + 15, bar.said))
    names = {name: colours.get(name, "var(--rest)") for bar in bars for name in bar.parts}
    ordered = {name: names[name] for name in [*colours, *names] if name in names}
    note = "" if is_shared else "<p>The totals differ too much for one scale: each bar shows shares of its own total.</p>"
    return note + (_legend(ordered) if legend else "") + _svg(len(bars) * (BAR + GAP), parts)


def _stage_bar(name: str, stages: Mapping[str, float], said: str) -> Bar:
    """Order the stages as a request passes them; what the total has beyond them is the rest."""
    parts = {stage: stages[stage] for stage in STAGES if stage in stages}
    parts |= {stage: value for stage, value in stages.items() if stage not in {*STAGES, "total"}}
    rest = stages.get("total", 0.0) - sum(parts.values())
    return Bar(name, parts | ({"rest": rest} if rest > 0 else {}), said)


def _stage_colours(bars: Sequence[Bar]) -> dict[str, str]:
    others = dict.fromkeys(name for bar in bars for name in bar.parts if name not in STAGES and name != "rest")
    known = {name: _colour(place) for name, place in STAGES.items()}
    return known | {name: _colour(place) for place, name in enumerate(others)} | {"rest": "var(--rest)"}


def _batches(name: str, batches: Mapping[str, int]) -> str:
    sizes = {int(size): count for size, count in batches.items() if count}
    total = sum(sizes.values())
    if not total:
        return ""
    mean = sum(size * count for size, count in sizes.items()) / total
    largest = max(sizes)
    shown = range(1, largest + 1) if largest <= 32 else sorted(sizes)  # noqa: PLR2004
    width = min(48.0, (WIDTH - 20) / len(shown))
    most = max(sizes.values())
    parts = [_rule((0, WIDTH), (84, 84), "axis")]
    for place, size in enumerate(shown):
        count = sizes.get(size, 0)
        height, middle = 66 * count / most, (place + 0.5) * width
        said = f"batch of {size}: {count} executions, {count / total:.0%}"
        parts.append(_rect((place * width + 2, 84 - height), (width - 4, height), "var(--c0)", said))
        if width > NARROW and count:
            parts.append(_text(middle, 80 - height, f"{count / total:.0%}", "middle"))
        if width > NARROW or not place or size % 4 == 0:
            parts.append(_text(middle, 100, str(size), "middle"))
    return f"<h3>{escape(name)}: mean {mean:.2f}</h3>{_svg(106, parts)}"


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, said: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(said)}</text>'


def _rule(x: tuple[float, float], y: tuple[float, float], classes: str) -> str:
    return f'<line x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}" class="{classes}"/>'


def _rect(corner: tuple[float, float], size: tuple[float, float], colour: str, said: str) -> str:
    place = f'x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{max(size[0], 0.5):.1f}" height="{size[1]:.1f}"'
    return f'<rect {place} rx="2" fill="{colour}"><title>{escape(said)}</title></rect>'


def _dot(x: float, y: float, colour: str, said: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" class="dot"><title>{escape(said)}</title></circle>'


def _legend(names: Mapping[str, str]) -> str:
    return (
        '<div class="legend">'
        + "".join(f'<span><i style="background:{c}"></i>{escape(n)}</span>' for n, c in names.items())
        + "</div>"
    )


def _median(entry: _Entry, field: str) -> float:
    return float(median(getattr(one, field) for one in entry.rounds))


def _median_stages(entry: _Entry) -> dict[str, float]:
    timed = [one.outcome.stages for one in entry.rounds]
    return {stage: median(stages.get(stage, 0.0) for stages in timed) for stage in timed[0]}


def _ratio(entry: _Entry, base: Sequence[float]) -> float:
    """Give the median of the rounds' ratios, as `versus` does."""
    return median(one.rate / other for one, other in zip(entry.rounds, base, strict=False))


def _summed(entry: _Entry) -> Mapping[str, int]:
    return sum((Counter(one.triton.batches) for one in entry.rounds if one.triton), Counter())


def _colour(place: int) -> str:
    return f"var(--c{place % COLOURS})"


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _round_up(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * decade for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * decade >= value)
