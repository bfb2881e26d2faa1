"""Metrics that all workers of a host count together."""

import pytest

from app.resilience.worker_table import COUNTER, GAUGE, WorkerTable
from app.telemetry.instruments import CommonGauge, Counter, Gauge, Histogram, WorkerGauge, read_names
from tests.support import OpenTable


@pytest.fixture
def tables(open_table: OpenTable) -> list[WorkerTable]:
    two = [open_table(), open_table()]
    for table in two:
        table.refresh()
    return two


def samples(table: WorkerTable, instrument: Counter | Histogram | Gauge) -> dict[str, float]:
    """Return the samples of a metric, by name and labels as Prometheus writes them."""
    family = instrument.collect(read_names(table.keys(GAUGE if isinstance(instrument, Gauge) else COUNTER)))
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for sample in family.samples
    }


def test_events_of_all_workers_count(tables: list[WorkerTable]) -> None:
    first, second = (Counter(table, "events", "Events.", ["kind", "status"]) for table in tables)
    first.add(1, "a", "200")
    second.add(2, "a", "200")
    second.add(1, "b", "")

    expected = {"events_total,kind=a,status=200": 3, "events_total,kind=b,status=": 1}
    assert samples(tables[0], first) == samples(tables[0], second) == expected


def test_known_label_values_are_shown_before_there_are_events(tables: list[WorkerTable]) -> None:
    """The first event is then visible as an increase; counters without labels are shown as well."""
    assert samples(tables[0], Counter(tables[0], "a", "A.", ["kind"], ["x", "y"])) == {"a_total,kind=x": 0, "a_total,kind=y": 0}
    assert samples(tables[0], Counter(tables[0], "b", "B.")) == {"b_total": 0}


def test_counters_go_on_when_a_worker_is_replaced(open_table: OpenTable) -> None:
    watching, ending = open_table(), WorkerTable()
    watching.refresh()
    counters = [Counter(table, "events", "Events.") for table in (watching, ending)]
    gauges = [Gauge(table, "active", "Active.") for table in (watching, ending)]
    for number in (0, 1):
        counters[number].add(10 + number)
        gauges[number].add(5)
    ending.close()
    watching.refresh()
    assert samples(watching, counters[0]) == {"events_total": 21}
    assert samples(watching, gauges[0]) == {"active": 5}
    replacement = open_table()
    watching.refresh()

    assert samples(watching, Gauge(replacement, "active", "Active.")) == {"active": 5}
    Counter(replacement, "events", "Events.").add(1)
    assert samples(watching, counters[0]) == {"events_total": 22}


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [(0.0, [1, 1, 1]), (0.1, [1, 1, 1]), (0.11, [0, 1, 1]), (1.0, [0, 1, 1]), (1.5, [0, 0, 1]), (1e6, [0, 0, 1])],
)
def test_a_duration_counts_in_its_bucket_and_all_larger_ones(tables: list[WorkerTable], seconds: float, counts: list[int]) -> None:
    """Prometheus' buckets are cumulative."""
    histogram = Histogram(tables[0], "took_seconds", "Took.", ["what"], [0.1, 1.0])
    histogram.observe(seconds, "x")

    found = samples(tables[0], histogram)
    assert [found[f"took_seconds_bucket,le={bound},what=x"] for bound in ("0.1", "1.0", "+Inf")] == counts
    assert found["took_seconds_count,what=x"] == 1
    assert found["took_seconds_sum,what=x"] == pytest.approx(seconds, abs=1e-6)


def test_durations_of_all_workers_count(tables: list[WorkerTable]) -> None:
    first, second = (Histogram(table, "took_seconds", "Took.", ["what"], [1.0]) for table in tables)
    first.observe(0.5, "x")
    second.observe(2.5, "x")
    second.observe(0.25, "y")

    found = samples(tables[0], first)
    assert found == samples(tables[0], second)
    assert (found["took_seconds_count,what=x"], found["took_seconds_sum,what=x"]) == (2, 3.0)
    assert (found["took_seconds_count,what=y"], found["took_seconds_sum,what=y"]) == (1, 0.25)


def test_gauges_are_added_up(tables: list[WorkerTable]) -> None:
    """This does not hold for gauges that are equal in all workers or of interest for each worker."""
    for number, table in enumerate(tables, start=1):
        Gauge(table, "active", "Active.", ["model"]).set(number, "x")
        CommonGauge(table, "limit", "Limit.", ["model"]).set(10 * number, "x")
        WorkerGauge(table, "memory_bytes", "Memory.").set(100 * number)

    assert samples(tables[0], Gauge(tables[0], "active", "Active.", ["model"])) == {"active,model=x": 3}
    assert samples(tables[0], CommonGauge(tables[0], "limit", "Limit.", ["model"])) == {"limit,model=x": 20}
    memory = samples(tables[0], WorkerGauge(tables[1], "memory_bytes", "Memory."))
    assert memory == {"memory_bytes,worker=1": 100, "memory_bytes,worker=2": 200}


def test_metrics_whose_names_begin_alike_are_apart(tables: list[WorkerTable]) -> None:
    gauge, longer, counter = Gauge(tables[0], "a", "A."), Gauge(tables[0], "ab", "AB."), Counter(tables[0], "a", "A.")
    gauge.set(1)
    longer.set(2)
    counter.add(4)

    assert samples(tables[0], gauge) == {"a": 1}
    assert samples(tables[0], longer) == {"ab": 2}
    assert samples(tables[0], counter) == {"a_total": 4}
