"""Charts as SVG: curves, stacked bars and histograms of batch sizes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.report.svg import REST_COLOUR, WIDTH, area, dot, legend, polyline, rectangle, rule, shorten, svg, text
from bench.report.text import number

_HEIGHT = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 150, 30, 44
_BAR_HEIGHT, _BAR_GAP = 22, 12
_LABEL_LETTERS = 19  # letters that fit next to a plot
_LABEL_DISTANCE = 26  # minimum distance of labels on an axis
_SHARED_SCALE = 25  # ratio of the longest bar above which each bar gets its own scale
_MOST_TICKS = 8
_MOST_BATCHES = 32


class Line(NamedTuple):
    """One curve."""

    name: str
    points: list[tuple[float, float]]
    """Points in the units of the axes."""


class Bar(NamedTuple):
    """One stacked bar."""

    name: str
    parts: dict[str, float]
    label: str
    """Text at its end."""
    marks: Sequence[float] = ()
    """Single measurements, drawn as dots."""


class Axis(NamedTuple):
    """A linear or logarithmic scale."""

    low: float
    high: float
    ticks: dict[float, str]
    """Positions and labels of the ticks."""
    title: str
    is_log: bool

    def place(self, value: float) -> float:
        """Return the position of a value, 0 to 1."""
        if self.is_log:
            return (math.log10(max(value, self.low)) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


def log_axis(values: Sequence[float], title: str) -> Axis:
    """Make a logarithmic axis that covers all values."""
    low, high = min(values), max(values)
    steps = [factor * 10.0**decade for decade in range(-4, 6) for factor in (1, 2, 5)]
    low = max((step for step in steps if step <= low), default=steps[0])
    high = min((step for step in steps if step >= high and step > low), default=steps[-1])
    ticks = {step: f"{step:,g}" for step in steps if low <= step <= high}
    if len(ticks) > _MOST_TICKS:
        ticks = {step: label for step, label in ticks.items() if label.strip("0.") == "1" or label.startswith("1")}
    return Axis(low, high, ticks, title, is_log=True)


def linear_axis(most: float, title: str) -> Axis:
    """Make a linear axis from zero to at least `most`."""
    decade = 10.0 ** math.floor(math.log10(max(most, 1e-9)))
    high = next(step * decade for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * decade >= most)
    return Axis(0, high, {high * part / 4: f"{high * part / 4:,g}" for part in range(5)}, title, is_log=False)


def stack(lines: Sequence[Line]) -> list[Line]:
    """Stack curves; missing points count as zero. The sum of all comes first."""
    sums = dict.fromkeys(sorted({x for line in lines for x, _ in line.points}), 0.0)
    stacked = []
    for line in lines:
        values = dict(line.points)
        sums = {x: below + values.get(x, 0.0) for x, below in sums.items()}
        stacked.append(Line(line.name, list(sums.items())))
    return stacked[::-1]


def draw_lines(  # noqa: PLR0913 - the parts of a chart
    lines: Sequence[Line], across: Axis, up: Axis, colours: Mapping[str, str], *, dots: bool = False, areas: bool = False
) -> str:
    """Draw curves with their names at their ends, or the areas below them, each in front of the previous ones."""

    def x(value: float) -> float:
        return _LEFT + across.place(value) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - up.place(value) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [*_grid(up, y), *_base(across, x)]
    for line in lines:
        colour = colours[line.name]
        places = [(x(a), y(b)) for a, b in line.points]
        if areas:
            parts.append(area(places, y(0), colour, line.name))
        parts.append(polyline(places, colour, line.name))
        for a, b in line.points if dots else []:
            parts.append(dot(x(a), y(b), colour, f"{line.name}, {across.title} {a:g}: {number(b)} {up.title}"))
    right = WIDTH - _RIGHT
    for line, place in _spread([(line, y(line.points[-1][1])) for line in lines]):
        parts.append(f'<g stroke="{colours[line.name]}">{rule((right + 6, right + 16), (place, place), "line")}</g>')
        parts.append(text(right + 21, place + 4, shorten(line.name, _LABEL_LETTERS), "strong"))
    is_cut = any(len(line.name) > _LABEL_LETTERS for line in lines)
    return (legend({line.name: colours[line.name] for line in lines}) if is_cut else "") + svg(_HEIGHT, parts)


def draw_bars(bars: Sequence[Bar], colours: Mapping[str, str], *, has_legend: bool = True) -> str:
    """Draw stacked bars below each other; parts without a colour are grey."""
    totals = [max([sum(bar.parts.values()), *bar.marks]) for bar in bars]
    is_shared = len(bars) == 1 or not has_legend or max(totals) <= _SHARED_SCALE * max(min(totals), 1e-9)
    labels = min(220, 20 + 7 * max(len(bar.name) for bar in bars))
    room = WIDTH - labels - 110
    parts = []
    for place, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        scale = room / ((max(totals) if is_shared else total) or 1)
        top, left = place * (_BAR_HEIGHT + _BAR_GAP), float(labels)
        parts.append(text(labels - 10, top + 15, shorten(bar.name, 30), "end strong"))
        for name, value in bar.parts.items():
            colour, title = colours.get(name, REST_COLOUR), f"{bar.name}: {name} {number(value)}"
            parts.append(rectangle((left, top), (value * scale - 1.5, _BAR_HEIGHT), colour, title))
            left += value * scale
        parts += [dot(labels + mark * scale, top + _BAR_HEIGHT / 2, "var(--ink)", number(mark)) for mark in bar.marks]
        end = max([left, *(labels + mark * scale for mark in bar.marks)])
        parts.append(text(end + 8, top + 15, bar.label))
    names = {name: colours.get(name, REST_COLOUR) for bar in bars for name in bar.parts}
    ordered = {name: names[name] for name in [*colours, *names] if name in names}
    note = "" if is_shared else "<p>The totals differ too much for one scale: each bar shows shares of its own total.</p>"
    return note + (legend(ordered) if has_legend else "") + svg(len(bars) * (_BAR_HEIGHT + _BAR_GAP), parts)


def draw_batches(batches: Mapping[str, int]) -> str:
    """Draw the number of executions by batch size; at least one must be above zero."""
    sizes = {int(size): count for size, count in batches.items() if count}
    total, most, largest = sum(sizes.values()), max(sizes.values()), max(sizes)
    shown = range(1, largest + 1) if largest <= _MOST_BATCHES else sorted(sizes)
    width = min(48.0, (WIDTH - 20) / len(shown))
    parts = [rule((0, WIDTH), (84, 84), "axis")]
    for place, size in enumerate(shown):
        count = sizes.get(size, 0)
        height, middle = 66 * count / most, (place + 0.5) * width
        title = f"batch of {size}: {count} executions, {count / total:.0%}"
        parts.append(rectangle((place * width + 2, 84 - height), (width - 4, height), "var(--c0)", title))
        if width > _LABEL_DISTANCE and count:
            parts.append(text(middle, 80 - height, f"{count / total:.0%}", "middle"))
        if width > _LABEL_DISTANCE or not place or size % 4 == 0:
            parts.append(text(middle, 100, str(size), "middle"))
    return svg(106, parts)


def _grid(up: Axis, y: Callable[[float], float]) -> list[str]:
    """Draw the vertical axis: its title, and a horizontal line for each tick."""
    parts = [text(0, 12, up.title)]
    for value, label in up.ticks.items():
        parts += [rule((_LEFT, WIDTH - _RIGHT), (y(value), y(value)), "grid"), text(_LEFT - 8, y(value) + 4, label, "end")]
    return parts


def _base(across: Axis, x: Callable[[float], float]) -> list[str]:
    """Draw the horizontal axis; omit overlapping labels."""
    parts = []
    floor, last = _HEIGHT - _BOTTOM, -math.inf
    for value, label in across.ticks.items():
        parts.append(rule((x(value), x(value)), (floor, floor + 4), "axis"))
        if x(value) - last > _LABEL_DISTANCE:
            parts.append(text(x(value), floor + 18, label, "middle"))
            last = x(value)
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return [*parts, rule((_LEFT, WIDTH - _RIGHT), (floor, floor), "axis"), text(middle, _HEIGHT - 6, across.title, "middle")]


def _spread(ends: Sequence[tuple[Line, float]]) -> list[tuple[Line, float]]:
    """Place labels at the ends of their curves so that they do not overlap."""
    placed: list[tuple[Line, float]] = []
    for line, end in sorted(ends, key=lambda pair: pair[1]):
        placed.append((line, max(end, placed[-1][1] + 16) if placed else end))
    over = max(0.0, placed[-1][1] - (_HEIGHT - _BOTTOM)) if placed else 0.0
    return [(line, place - over) for line, place in placed]
