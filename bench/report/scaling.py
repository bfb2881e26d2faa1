"""Throughput over the number of Tritons or workers, and the number of clients."""

from collections import Counter
from typing import Literal

import msgspec

from bench.report.contests import Rounds
from bench.report.measurements import Run


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
                **msgspec.structs.asdict(point.middle),
            )
            for point in self.measured
        ]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
