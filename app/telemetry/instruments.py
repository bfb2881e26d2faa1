"""Prometheus metrics that all workers of a host share.

prometheus-client writes the exposition format. Its multiprocess mode is not used: it needs files per process, which accumulate as
workers are replaced, and a full disk kills the process with SIGBUS.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from app.resilience.worker_table import COUNTER, GAUGE, SEPARATOR, WorkerTable

_MICRO = 1_000_000

Labels = tuple[str, ...]
Names = Mapping[str, Sequence[Labels]]
"""Label values by metric name."""


class _Labelled:
    """A metric with a column for each combination of label values."""

    _kind: ClassVar[str] = GAUGE
    _family: ClassVar[type[GaugeMetricFamily | CounterMetricFamily]] = GaugeMetricFamily

    def __init__(
        self, table: WorkerTable, name: str, description: str, labels: Sequence[str] = (), known: Iterable[str] = ()
    ) -> None:
        """Count in a table; `known` are values of the only label that are exported before their first event."""
        self.name, self._description, self._labels = name, description, labels
        self._table = table
        self._columns: dict[Labels, int] = {}
        for value in known:
            self.add(0, value)
        if not labels:
            self.add(0)

    def add(self, value: int, *values: str) -> None:
        """Add to this worker's number with these label values."""
        column = self._columns.get(values)
        self._table.cells[self._column(values) if column is None else column] += value

    def _column(self, values: Labels) -> int:
        column = self._columns.get(values)
        if column is None:
            column = self._columns[values] = self._table.column(self._kind + SEPARATOR.join((self.name, *values)))
        return column

    def collect(self, names: Names) -> Metric:
        """Return the numbers of all workers; `names` are those of all counters, or of all gauges."""
        family = self._family(self.name, self._description, labels=self._labels)
        for values in names.get(self.name, ()):
            number = self._merge(self._column(values))
            if number is not None:
                family.add_metric(values, number)
        return family

    def _merge(self, column: int) -> int | None:
        return self._table.total(column)


class Counter(_Labelled):
    """Counts events, by label values."""

    _kind, _family = COUNTER, CounterMetricFamily

    def _merge(self, column: int) -> int:
        return self._table.total_ever(column)


class Histogram:
    """Counts durations or sizes in buckets, by label values."""

    def __init__(self, table: WorkerTable, name: str, description: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """Count in a table; `bounds` of the buckets are upper ones, ascending, and one more bucket contains larger values."""
        self.name, self._description, self._labels = name, description, labels
        self._table = table
        self._bounds = bounds
        self._suffixes = [*map(floatToGoString, bounds), "+Inf", "sum"]
        self._columns: dict[Labels, list[int]] = {}

    def observe(self, number: float, *values: str) -> None:
        """Count a duration in seconds, or a size, with these label values."""
        self.observe_all([(number, values)])

    def observe_all(self, observations: Iterable[tuple[float, Labels]]) -> None:
        """Count durations in seconds, or sizes, each with its label values."""
        cells = self._table.cells
        for number, values in observations:
            columns = self._columns.get(values)
            if columns is None:
                columns = self._columns[values] = self._find_columns(values)
            cells[columns[bisect_left(self._bounds, number)]] += 1
            cells[columns[-1]] += round(number * _MICRO)

    def total(self, *values: str) -> float:
        """Return the sum of what all workers have observed with these label values."""
        return self._table.total_ever(self._find_columns(values)[-1]) / _MICRO

    def collect(self, counters: Names) -> Metric:
        """Return the counts of all workers."""
        family = HistogramMetricFamily(self.name, self._description, labels=self._labels)
        for values in sorted({values[:-1] for values in counters.get(self.name, ())}):
            *counts, total = map(self._table.total_ever, self._find_columns(values))
            buckets = list(zip(self._suffixes, accumulate(counts), strict=False))
            family.add_metric(values, buckets, total / _MICRO)
        return family

    def _find_columns(self, values: Labels) -> list[int]:
        return [self._table.column(COUNTER + SEPARATOR.join((self.name, *values, suffix))) for suffix in self._suffixes]


class Gauge(_Labelled):
    """A number that each worker sets or changes; exported as the sum over all living workers."""

    def set(self, value: int, *values: str) -> None:
        """Set this worker's number."""
        self._table.set(self._column(values), value)

    def clear_except(self, known: Collection[str]) -> None:
        """Reset this worker's numbers whose first label value is not in `known`, because the labelled object is gone."""
        for values, column in self._columns.items():
            if values[0] not in known:
                self._table.set(column, 0)


class CommonGauge(Gauge):
    """A number that is the same for all workers, or 0 if a worker does not know it; exported as the maximum unless that is 0."""

    def _merge(self, column: int) -> int | None:
        return max(self._table.values(column)) or None


class WorkerGauge(Gauge):
    """A number of each living worker, exported with the label `worker`, the worker's row number."""

    def numbers(self) -> list[int]:
        """Return the numbers of all living workers."""
        return self._table.values(self._column(()))

    def collect(self, _: Names) -> Metric:
        """Return the numbers of all workers."""
        family = GaugeMetricFamily(self.name, self._description, labels=["worker"])
        numbers = self.numbers()  # first, because this may find a worker that has just started
        for row, number in zip(self._table.rows(), numbers, strict=True):
            family.add_metric([str(row)], number)
        return family


def read_names(keys: Iterable[str]) -> Names:
    """Parse metric names and label values from the keys of a table."""
    found: dict[str, list[Labels]] = {}
    for key in keys:
        name, *values = key.split(SEPARATOR)
        found.setdefault(name, []).append(tuple(values))
    return found
