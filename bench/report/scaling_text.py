"""A scaling as text for a terminal."""

from collections.abc import Iterator

from bench.load.driver import BUSY_SHARE
from bench.report.contest_text import spread
from bench.report.scaling import ScalePoint, Scaling
from bench.report.text import number, table

REMARKS = (
    "p50, p99: ms; errors: rejections (429) included; gateway: its CPU per request, ms; ratios: median of the rounds' (min..max)",
    "calls of N: share of the calls to Triton that had so many images, as the gateway's metrics count them",
)

_FIGURES = {"req/s": "requests/s", "p50": "p50", "p99": "p99", "errors %": "errors %", "gateway": "cpu gateway"}
"""Columns and the figures in them."""


def scaling_text(scaling: Scaling) -> str:
    """Describe a scaling: a table with a line per point, and remarks."""
    rounds = max(len(point.rounds) for point in scaling.points)
    head = f"{scaling.title}; medians of {rounds} interleaved rounds of {scaling.seconds:g} s"
    return "\n".join([head, table(scaling_rows(scaling)), *REMARKS, *_warnings(scaling)])


def scaling_rows(scaling: Scaling) -> list[list[str]]:
    """Return the head of a table, and a row for each measured point."""
    points = scaling.measured
    head = ["clients", f"{scaling.of}s", *_FIGURES, f"to {scaling.size(points[0])}", "images a call"]
    head += [f"{'' if place else 'calls of '}{size}" for place, size in enumerate(scaling.call_sizes)]
    head += ["images by Triton"] if scaling.of == "Triton" else []
    return [head, *(_row(scaling, point) for point in points)]


def _row(scaling: Scaling, point: ScalePoint) -> list[str]:
    cells = [str(point.clients), str(scaling.count(point))]
    cells += [number(point.median(figure)) for figure in _FIGURES.values()]
    cells += [spread(point.ratios(scaling.base(point), "requests/s")), number(point.images_per_call)]
    cells += [f"{share:.0%}" for share in scaling.call_shares(point).values()]
    return [*cells, " ".join(f"{share:.0%}" for share in point.image_shares)] if scaling.of == "Triton" else cells


def _warnings(scaling: Scaling) -> Iterator[str]:
    rounds = [one for point in scaling.points for one in point.rounds]
    if any(one.outcome.driver_cpu > BUSY_SHARE for one in rounds):
        yield f"the client used more than {BUSY_SHARE:.0%} of a core at times: the gateway may be faster than shown"
    yield from sorted({one.triton_note for one in rounds if one.triton_note})
