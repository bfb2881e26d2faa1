"""Results of a run of the load driver."""

from collections.abc import Iterable
from functools import cached_property

import msgspec
from hdrh.histogram import HdrHistogram

MAX_MICROSECONDS = 60_000_000
"""Maximum latency in a histogram."""
_SIGNIFICANT_DIGITS = 3


class Outcome(msgspec.Struct, dict=True):
    """The result of one run."""

    seconds: float
    """Time from the first request to the last response."""
    requests: int
    statuses: dict[str, int]
    """Number of requests by result: an HTTP status, `wrong` (200 with a wrong result) or `error` (no response)."""
    latency: str
    """Latency of correct responses and abandoned requests: an encoded HdrHistogram of microseconds."""
    stages: dict[str, float]
    """Mean milliseconds of each Server-Timing entry of correct responses."""
    driver_cpu: float
    """Share of one core that the load driver used."""
    overhead_p50: float = 0.0
    """Median milliseconds of correct responses outside of `decode` and `infer`, measured by the client."""
    codes: dict[str, list[str]] = {}
    """Codes of errors by status: the first one, and others of the responses that were parsed, which are not all."""
    model: str = ""
    """Name of the model according to the responses; empty if they do not contain it."""
    rejections: str = ""
    """Latency of rejections (429 and 503), encoded like `latency`; empty if there were none."""
    goodput: float = 0.0
    """Correct responses per second while requests were sent. `rate` also includes later responses and their time."""
    delay_p99: float = 0.0
    """For a load with a schedule: p99 of the driver's own delay after a request was due, in milliseconds."""

    @property
    def correct(self) -> int:
        """Number of correct responses."""
        return self.statuses.get("200", 0)

    @property
    def rate(self) -> float:
        """Correct responses per second."""
        return self.correct / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> float:
        """Share of requests without a correct response."""
        return 1 - self.correct / self.requests if self.requests else 0.0

    @cached_property
    def histogram(self) -> HdrHistogram:
        """The latency, in microseconds."""
        return HdrHistogram.decode(self.latency)

    def percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the responses arrived."""
        return float(self.histogram.get_value_at_percentile(percent)) / 1e3

    def rejection_percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the rejections arrived."""
        return float(HdrHistogram.decode(self.rejections).get_value_at_percentile(percent)) / 1e3

    @cached_property
    def mean(self) -> float:
        """Mean latency, milliseconds."""
        return float(self.histogram.get_mean_value()) / 1e3 if self.histogram.total_count else 0.0

    @cached_property
    def max(self) -> float:
        """Highest latency, milliseconds."""
        return float(self.histogram.get_max_value()) / 1e3


def encode_latencies(seconds: Iterable[float]) -> str:
    """Encode latencies as a histogram of microseconds."""
    histogram = _empty()
    for value in seconds:
        histogram.record_value(min(MAX_MICROSECONDS, max(1, round(value * 1e6))))
    return str(histogram.encode().decode("ascii"))


def merge_histograms(encoded: Iterable[str]) -> HdrHistogram:
    """Add up encoded histograms."""
    total = _empty()
    for text in encoded:
        total.decode_and_add(text)
    return total


def _empty() -> HdrHistogram:
    return HdrHistogram(1, MAX_MICROSECONDS, _SIGNIFICANT_DIGITS)
