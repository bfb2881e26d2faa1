"""Metrics that all workers of a host count together."""

import pytest

from app.resilience.worker_table import COUNTER, GAUGE, WorkerTable
from app.telemetry.instruments import CommonGauge, Counter, Gauge, Histogram, WorkerGauge, read_names
from app.telemetry.metrics import Metrics
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


def test_events_of_all_workers_count_and_known_labels_are_shown_before(tables: list[WorkerTable]) -> None:
    """The first event is then visible as an increase; counters without labels are shown as well."""
    first, second = (Counter(table, "events", "Events.", ["kind"], ["a", "x"]) for table in tables)
    assert samples(tables[0], first) == {"events_total,kind=a": 0, "events_total,kind=x": 0}
    first.add(1, "a")
    second.add(2, "a")
    second.add(1, "")
    expected = {"events_total,kind=a": 3, "events_total,kind=x": 0, "events_total,kind=": 1}
    assert samples(tables[0], first) == samples(tables[0], second) == expected
    assert samples(tables[0], Counter(tables[0], "b", "B.")) == {"b_total": 0}


def test_durations_of_all_workers_count_in_their_bucket_and_all_larger_ones(tables: list[WorkerTable]) -> None:
    """Prometheus' buckets are cumulative."""
    histograms = [Histogram(table, "took_seconds", "Took.", ["what"], [0.1, 1.0]) for table in tables]
    expected, found = {"0.1": 0, "1.0": 0, "+Inf": 0}, dict[str, float]()
    for count, (seconds, buckets) in enumerate([(0.1, 3), (0.11, 2), (1.0, 2), (1.5, 1)], 1):
        histograms[count % 2].observe(seconds, "x")
        for bound in list(expected)[3 - buckets :]:
            expected[bound] += 1
        found = samples(tables[0], histograms[0])
        assert {bound: found[f"took_seconds_bucket,le={bound},what=x"] for bound in expected} == expected
        assert found["took_seconds_count,what=x"] == count
    assert found["took_seconds_sum,what=x"] == pytest.approx(2.71)


def test_gauges_are_added_up_unless_they_are_common_or_of_interest_for_each_worker(tables: list[WorkerTable]) -> None:
    for number, table in enumerate(tables, start=1):
        Gauge(table, "active", "Active.", ["model"]).set(number, "x")
        CommonGauge(table, "limit", "Limit.", ["model"]).set(10 * number, "x")
        WorkerGauge(table, "memory_bytes", "Memory.").set(100 * number)
    assert samples(tables[0], Gauge(tables[0], "active", "Active.", ["model"])) == {"active,model=x": 3}
    assert samples(tables[0], CommonGauge(tables[0], "limit", "Limit.", ["model"])) == {"limit,model=x": 20}
    memory = samples(tables[0], WorkerGauge(tables[1], "memory_bytes", "Memory."))
    assert memory == {"memory_bytes,worker=1": 100, "memory_bytes,worker=2": 200}


def test_few_classes_of_a_pair_of_models_and_of_many_pairs_have_a_label(open_table: OpenTable) -> None:
    """Each new version of a model makes a pair."""
    first, second = (Metrics(open_table(), "0") for _ in range(2))
    labels = []
    for number in range(600):
        pair = "door", "b:1", f"a:{number // 50}"
        labels.append(first.class_label(*pair, f"class {number}"))
        first.shadow_boxes.add(1, *pair, labels[-1], "matched")
        if number == 49:
            assert [second.class_label(*pair, name) for name in ("class 7", "more")] == ["class 7", "other"]
            assert second.class_label("door", "b:2", "a:0", "more") == "more"
    assert (labels[499], labels[500], labels[-1]) == ("class 499", "other", "other")
