"""Contests: the rounds of several servers under the same load, and their comparison."""

from statistics import median

import msgspec

from bench.report.measurements import Measurement, Run


class Rounds(msgspec.Struct, kw_only=True):
    """Repeated measurements of the same case, interleaved with other cases."""

    rounds: list[Measurement] = []

    @property
    def middle(self) -> Measurement:
        """The round with the median throughput; there must be at least one round."""
        return sorted(self.rounds, key=lambda one: one.outcome.rate)[len(self.rounds) // 2]

    def median(self, figure: str) -> float:
        """Return the median of a figure over the rounds; a missing figure counts as zero."""
        return median(one.figures.get(figure, 0.0) for one in self.rounds) if self.rounds else 0.0

    def ratios(self, base: "Rounds", figure: str) -> list[float]:
        """Divide a figure by that of another case, round by round, so that noise in a whole round cancels out."""
        pairs = [
            (one.figures.get(figure, 0.0), other.figures.get(figure)) for one, other in zip(self.rounds, base.rounds, strict=False)
        ]
        return [one / other for one, other in pairs if other]


class ContestantResult(Rounds, kw_only=True):
    """One contestant of a contest and its rounds."""

    name: str
    model: str
    """Name of the model."""
    resident_mib: list[float] = []
    """Memory of each worker at the end."""
    unshared_mib: list[float] = []
    """The part of the memory that no other process uses."""


class Comparison(msgspec.Struct, frozen=True):
    """Pairs of contestants to compare."""

    title: str
    """Description of the base."""
    pairs: list[tuple[str, str]]
    """Names of a contestant and of its base."""


class Contest(msgspec.Struct, kw_only=True):
    """Several servers under the same load, in interleaved rounds."""

    title: str
    clients: int
    workers: int
    """Number of processes of each contestant."""
    seconds: float
    """Duration of each round."""
    entries: list[ContestantResult]
    left_out: dict[str, str] = {}
    """Contestants that could not take part, with the reasons."""
    comparisons: list[Comparison] = []

    def ratios(self, name: str, base: str, figure: str) -> list[float]:
        """Divide a figure of one contestant by that of another, round by round."""
        entries = {entry.name: entry for entry in self.entries}
        return entries[name].ratios(entries[base], figure)

    def runs(self) -> list[Run]:
        """Represent each contestant by its round with the median throughput."""
        found = []
        for entry in self.entries:
            if not entry.rounds:
                continue
            middle = entry.middle
            found.append(
                Run(
                    contestant=entry.name,
                    mode=f"versus: {self.title}",
                    model=entry.model,
                    clients=self.clients,
                    outcome=middle.outcome,
                    cpu_ms=middle.cpu_ms,
                    triton=middle.triton,
                    triton_note=middle.triton_note,
                    figures=middle.figures | {"worker MiB": round(max(entry.resident_mib, default=0.0), 1)},
                    rounds=entry.rounds,
                )
            )
        return found
