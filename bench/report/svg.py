"""SVG elements as text. All drawings are 760 units wide."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 760
COLOURS = 8
"""Number of colours in the style sheet."""
REST_COLOUR = "var(--rest)"


def svg(height: float, parts: Sequence[str]) -> str:
    """Combine elements to a drawing."""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(parts)}</svg>'


def text(x: float, y: float, content: str, classes: str = "") -> str:
    """Write one line; `y` is its base line."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(content)}</text>'


def rule(x: tuple[float, float], y: tuple[float, float], classes: str) -> str:
    """Draw a straight line."""
    return f'<line x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}" class="{classes}"/>'


def rectangle(corner: tuple[float, float], size: tuple[float, float], colour: str, title: str) -> str:
    """Draw a rectangle with a tooltip."""
    place = f'x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{max(size[0], 0.5):.1f}" height="{size[1]:.1f}"'
    return f'<rect {place} rx="2" fill="{colour}"><title>{escape(title)}</title></rect>'


def dot(x: float, y: float, colour: str, title: str) -> str:
    """Draw a point with a tooltip."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" class="dot"><title>{escape(title)}</title></circle>'


def polyline(points: Sequence[tuple[float, float]], colour: str, title: str) -> str:
    """Draw a curve with a tooltip."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" class="line" stroke="{colour}"><title>{escape(title)}</title></polyline>'


def area(points: Sequence[tuple[float, float]], floor: float, colour: str, title: str) -> str:
    """Fill the area between a curve and a horizontal line below it, with a tooltip."""
    corners = [(points[0][0], floor), *points, (points[-1][0], floor)]
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<polygon points="{places}" class="area" fill="{colour}"><title>{escape(title)}</title></polygon>'


def legend(colours: Mapping[str, str]) -> str:
    """Draw a legend of the colours, as HTML."""
    entries = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def colour(place: int) -> str:
    """Return the colour of the entry with this index."""
    return f"var(--c{place % COLOURS})"


def shorten(name: str, most: int) -> str:
    """Truncate a name to `most` letters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
