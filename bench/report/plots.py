"""Plots of measurements: latency curves, stages, CPU time and batch sizes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from bench.load.outcome import merge_histograms
from bench.report.charts import Axis, Bar, Line, draw_bars, draw_batches, draw_lines, log_axis
from bench.report.measurements import KINDS
from bench.report.svg import COLOURS, REST_COLOUR, colour
from bench.report.text import number

_PERCENTILE_TICKS = {0: "0", 50: "50", 90: "90", 99: "99", 99.9: "99.9", 99.99: "99.99"}
_STAGE_COLOURS = {"read": 3, "model": 4, "queue": 2, "decode": 1, "batch": 5, "infer": 0, "post": 6, "draw": 7}
"""Nereid's stages, in order, with their colours."""
_REST, _TOTAL = "rest", "total"


def latency_plot(histograms: Mapping[str, Iterable[str]], colours: Mapping[str, str]) -> str:
    """Draw latency over percentiles, both logarithmic, for the first few series.

    Args:
        histograms: Encoded histograms by name, which are added up.
        colours: Colours by name.
    """
    lines = [Line(name, _curve(encoded)) for name, encoded in list(histograms.items())[:COLOURS]]
    most = max(point[0] for line in lines for point in line.points)
    places = {1 / (1 - percent / 100): label for percent, label in _PERCENTILE_TICKS.items()}
    ticks = {place: label for place, label in places.items() if place <= most * 1.001}
    across = Axis(1, most, ticks, "percentile of the answers", is_log=True)
    return draw_lines(lines, across, log_axis([y for line in lines for _, y in line.points], "ms"), colours)


def stage_bar(name: str, stages: Mapping[str, float], label: str) -> Bar:
    """Order the stages as in a request; time outside of stages comes last."""
    parts = {stage: stages[stage] for stage in _STAGE_COLOURS if stage in stages}
    parts |= {stage: value for stage, value in stages.items() if stage not in {*_STAGE_COLOURS, _TOTAL}}
    rest = stages.get(_TOTAL, 0.0) - sum(parts.values())
    return Bar(name, parts | ({_REST: rest} if rest > 0 else {}), label)


def stage_plot(bars: Sequence[Bar]) -> str:
    """Draw bars of `stage_bar`."""
    others = dict.fromkeys(name for bar in bars for name in bar.parts if name not in _STAGE_COLOURS and name != _REST)
    known = {name: colour(place) for name, place in _STAGE_COLOURS.items()}
    return draw_bars(bars, known | {name: colour(place) for place, name in enumerate(others)} | {_REST: REST_COLOUR})


def cpu_plot(cpu_ms: Mapping[str, Mapping[str, float]]) -> str:
    """Draw CPU time per request by kind of process, for each name."""
    bars = [Bar(name, dict(parts), f"{number(sum(parts.values()))} ms") for name, parts in cpu_ms.items()]
    return draw_bars(bars, {kind: colour(place) for place, kind in enumerate(KINDS)})


def batch_plots(batches: Mapping[str, Mapping[str, int]]) -> str:
    """Draw the batch sizes of each name that has any."""
    parts = []
    for name, sizes in batches.items():
        executions = sum(sizes.values())
        if executions:
            mean = sum(int(size) * count for size, count in sizes.items()) / executions
            parts.append(f"<h3>{escape(name)}: mean {mean:.2f}</h3>{draw_batches(sizes)}")
    return "".join(parts)


def _curve(encoded: Iterable[str]) -> list[tuple[float, float]]:
    """Return points of (1 / share of slower responses, milliseconds), as far as there are enough responses."""
    histogram = merge_histograms(encoded)
    decades = math.log10(max(histogram.total_count, 10))
    steps = [10 ** (decades * step / 80) for step in range(81)]
    percents = [100 * (1 - 1 / step) for step in steps]
    values = histogram.get_percentile_to_value_dict(percents)
    return [(step, max(values[percent], 1) / 1e3) for step, percent in zip(steps, percents, strict=True)]
