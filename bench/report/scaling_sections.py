"""The part of a page about scaling."""

from collections.abc import Sequence
from html import escape

from bench.report.charts import Axis, Bar, Line, draw_bars, draw_lines, linear_axis
from bench.report.html import section, table
from bench.report.scaling import ScalePoint, Scaling
from bench.report.scaling_text import REMARKS, scaling_rows
from bench.report.svg import colour
from bench.report.text import number


def scaling_section(scaling: Scaling) -> str:
    """Draw a scaling; empty if nothing was measured."""
    points = scaling.measured
    if not points:
        return ""
    head, *rows = scaling_rows(scaling)
    cells = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    over_size = _throughput(f"{scaling.of}s", _lines([(point.load, scaling.count(point), point) for point in points]))
    over_clients = _throughput("clients", _lines([(scaling.size(point), point.clients, point) for point in points]), is_log=True)
    content = table(head, cells) + over_size + over_clients + _calls(scaling)
    return section(f"Scaling over {scaling.title}", "; ".join(REMARKS) + ".", content)


def _lines(points: Sequence[tuple[str, int, ScalePoint]]) -> list[Line]:
    """Collect the throughput of points over a number, by name of their curve."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, x, point in points:
        curves.setdefault(name, []).append((x, point.median("requests/s")))
    return [Line(name, values) for name, values in curves.items()]


def _throughput(over: str, lines: Sequence[Line], *, is_log: bool = False) -> str:
    """Draw throughput over a number; empty if it has only one value."""
    counts = sorted({x for line in lines for x, _ in line.points})
    if len(counts) == 1:
        return ""
    across = Axis(counts[0] if is_log else 0, counts[-1], {count: f"{count:g}" for count in counts}, over, is_log)
    up = linear_axis(max(y for line in lines for _, y in line.points), "requests/s")
    colours = {line.name: colour(place) for place, line in enumerate(lines)}
    return f"<h3>Throughput over {over}</h3>{draw_lines(lines, across, up, colours, dots=True)}"


def _calls(scaling: Scaling) -> str:
    """Draw the batch sizes of calls to Triton."""
    colours = {size: colour(place) for place, size in enumerate(scaling.call_sizes)}
    bars = [
        Bar(
            f"{scaling.size(point)}, {point.load}",
            {size: share for size, share in scaling.call_shares(point).items() if share},
            f"mean {number(point.images_per_call)}",
        )
        for point in scaling.measured
        if point.calls
    ]
    return f"<h3>Calls to Triton by the number of images in them</h3>{draw_bars(bars, colours)}" if bars else ""
