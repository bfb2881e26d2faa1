"""A Grafana dashboard as one HTML page: each panel with its values, at its position."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from bench.report.charts import Line, draw_lines, linear_axis, stack
from bench.report.dashboard import Dashboard, Panel
from bench.report.svg import colour
from bench.report.text import number

_STYLE = Path(__file__).with_name("page.css")
_UNITS = {
    "bytes": (2**-20, "MiB"),
    "ops": (1, "per second"),
    "percentunit": (100, "%"),
    "reqps": (1, "requests/s"),
    "s": (1e3, "ms"),
    "short": (1, ""),
}
"""Factor and displayed name, by Grafana's name of a unit."""


class Curve(NamedTuple):
    """One series of a panel."""

    name: str
    points: list[tuple[float, float]]
    """Seconds since the start of the picture, and value."""


def dashboard_page(dashboard: Dashboard, curves: Mapping[int, Sequence[Curve]], seconds: float) -> str:
    """Draw a dashboard.

    Args:
        dashboard: The dashboard.
        curves: The series of each panel, by its id.
        seconds: Duration of the picture.
    """
    cells = "".join(_cell(panel, curves.get(panel.id, ()), seconds) for panel in dashboard.panels)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(dashboard.title)}</title>'
    style = f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    body = f'<h1>{escape(dashboard.title)}</h1><div class="panels">{cells}</div>'
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body class="dashboard">{body}</body></html>\n'


def _cell(panel: Panel, curves: Sequence[Curve], seconds: float) -> str:
    place = panel.grid_pos
    where = f"grid-column:{place.x + 1}/span {place.w};grid-row:{place.y + 1}/span {place.h}"
    if panel.type == "row":
        return f'<h2 style="{where}">{escape(panel.title)}</h2>'
    drawn = [curve for curve in curves if curve.points]
    factor, unit = _UNITS.get(panel.unit, (1, panel.unit))
    if not drawn:
        content = "<p>no data</p>"
    elif panel.type == "stat":
        last = drawn[0].points[-1][1] * factor
        content = f'<p class="stat">{escape(drawn[0].name) or number(last)} {escape(unit)}</p>'
    else:
        content = _chart(panel, drawn, seconds)
    return f'<section style="{where}"><h3 title="{escape(panel.description)}">{escape(panel.title)}</h3>{content}</section>\n'


def _chart(panel: Panel, curves: Sequence[Curve], seconds: float) -> str:
    factor, unit = _UNITS.get(panel.unit, (1, panel.unit))
    lines = [Line(curve.name, [(time, value * factor) for time, value in curve.points]) for curve in curves]
    colours = {line.name: colour(place) for place, line in enumerate(lines)}
    if panel.is_stacked:
        lines = stack(lines)
    most = max(value for line in lines for _, value in line.points)
    return draw_lines(lines, linear_axis(seconds, "seconds"), linear_axis(most or 1, unit), colours, areas=panel.is_stacked)
