"""Charts as SVG in the colours of `page.css`, without scripts."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

import pygal
from pygal.style import Style

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


def draw_curves(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], across: str, *, ticks: Mapping[str, float] | None = None
) -> str:
    """Draw curves over the axis `across`; with ticks, both axes are logarithmic."""
    labels = ticks and [{"label": label, "value": value} for label, value in ticks.items()]
    chart = pygal.XY(**_options(title, _HEIGHT), x_title=across, x_labels=labels, logarithmic=bool(ticks), show_dots=not ticks)
    for name, points in curves.items():
        chart.add(name, points)
    return _render(chart)


def draw_bars(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
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
