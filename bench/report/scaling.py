"""Throughput over the number of Tritons or workers, and the number of clients."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from bench.load.driver import BUSY_SHARE
from bench.report.contest_text import spread
from bench.report.contests import Rounds
from bench.report.measurements import Run
from bench.report.text import number, table

_REMARKS = (
    "p50, p99: ms; errors: rejections (429) included; gateway: its CPU per request, ms; ratios: median of the rounds' (min..max)",
    "calls of N: share of the calls to Triton that had so many images, as the gateway's metrics count them",
)
_FIGURES = {"req/s": "requests/s", "p50": "p50", "p99": "p99", "errors %": "errors %", "gateway": "cpu gateway"}
"""Columns and the figures in them."""


class ScalePoint(Rounds, kw_only=True):
    """A gateway of one size under load from a number of clients."""

    tritons: int
    workers: int
    clients: int

    @property
    def load(self) -> str:
        """Describe the load."""
        return _number(self.clients, "client")

    @property
    def calls(self) -> Counter[str]:
        """Calls to Triton in all rounds, by batch size: `1`, `2`, `3-4`."""
        return sum((Counter(one.calls) for one in self.rounds), Counter())

    @property
    def images(self) -> list[int]:
        """Images processed by each Triton, in all rounds with this measurement."""
        counted = [one.images_by_triton for one in self.rounds if one.images_by_triton]
        return [sum(images) for images in zip(*counted, strict=True)]

    @property
    def image_shares(self) -> list[float]:
        """Share of the images processed by each Triton, 0 to 1."""
        return [images / (sum(self.images) or 1) for images in self.images]

    @property
    def images_per_call(self) -> float:
        """Mean number of images per call."""
        calls = self.calls.total()
        return sum(self.images) / calls if calls else 0.0


class Scaling(msgspec.Struct, kw_only=True):
    """Gateways of several sizes, each under load from several numbers of clients, in interleaved rounds."""

    of: Literal["Triton", "worker"]
    """The scaled dimension."""
    model: str
    seconds: float
    """Duration of each round."""
    points: list[ScalePoint]

    @property
    def title(self) -> str:
        """Describe the scaled dimension and the constants."""
        first = self.points[0]
        fixed = _number(first.workers, "worker") if self.of == "Triton" else _number(first.tritons, "Triton")
        return f"{self.of}s: {self.model}, {fixed}"

    @property
    def measured(self) -> list[ScalePoint]:
        """The points with at least one round."""
        return [point for point in self.points if point.rounds]

    @property
    def call_sizes(self) -> list[str]:
        """The batch sizes of calls, ascending."""
        sizes = {size for point in self.points for size in point.calls}
        return sorted(sizes, key=lambda size: int(size.partition("-")[0]))

    def count(self, point: ScalePoint) -> int:
        """Return the number of Tritons or workers of a point."""
        return point.tritons if self.of == "Triton" else point.workers

    def size(self, point: ScalePoint) -> str:
        """Describe the gateway of a point."""
        return _number(self.count(point), self.of)

    def base(self, point: ScalePoint) -> ScalePoint:
        """Return the point of the smallest gateway with the same number of clients."""
        return min((other for other in self.points if other.clients == point.clients), key=self.count)

    def call_shares(self, point: ScalePoint) -> dict[str, float]:
        """Return the share of a point's calls, 0 to 1, for each of `call_sizes`."""
        calls = point.calls
        return {size: calls[size] / (calls.total() or 1) for size in self.call_sizes}

    def runs(self) -> list[Run]:
        """Represent each point by its round with the median throughput."""
        return [
            Run(
                contestant=self.size(point),
                mode=f"scale: {self.title}",
                model=self.model,
                clients=point.clients,
                rounds=point.rounds,
                **msgspec.structs.asdict(point.middle),
            )
            for point in self.measured
        ]


def scaling_text(scaling: Scaling) -> str:
    """Describe a scaling: a table with a line per point, and remarks."""
    rounds = max(len(point.rounds) for point in scaling.points)
    head = f"{scaling.title}; medians of {rounds} interleaved rounds of {scaling.seconds:g} s"
    points = scaling.measured
    columns = ["clients", f"{scaling.of}s", *_FIGURES, f"to {scaling.size(points[0])}", "images a call"]
    columns += [f"{'' if place else 'calls of '}{size}" for place, size in enumerate(scaling.call_sizes)]
    columns += ["images by Triton"] if scaling.of == "Triton" else []
    return "\n".join([head, table([columns, *(_row(scaling, point) for point in points)]), *_REMARKS, *_warnings(scaling)])


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


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
