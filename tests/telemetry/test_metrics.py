"""Everything that Prometheus scrapes."""

import pytest

from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics, render
from tests.support import OpenTable


@pytest.mark.parametrize("version", ["x", "1.x.0", ""])
def test_a_version_that_is_none_gets_the_usual_format(table: WorkerTable, version: str) -> None:
    text, content_type = render(Metrics(table, "1.2.3").collect(), f"application/openmetrics-text; version={version}")

    assert content_type.startswith(("text/plain", "application/openmetrics-text"))
    assert b"api_build_info" in text


def test_models_in_use_are_those_of_all_workers(open_table: OpenTable) -> None:
    first, second = (Metrics(open_table(), "0") for _ in range(2))
    first.model_active.set(1, "a")
    second.model_active.set(0, "b")

    assert first.models() == second.models() == {"a", "b"}


def test_few_classes_of_a_pair_of_models_have_a_label(open_table: OpenTable) -> None:
    first, second = (Metrics(open_table(), "0") for _ in range(2))
    for number in range(50):
        label = first.class_label("door", "b:1", "a:1", f"class {number}")
        assert label == f"class {number}"
        first.shadow_boxes.add(1, "door", "b:1", "a:1", label, "matched")

    assert [second.class_label("door", "b:1", "a:1", name) for name in ("class 7", "one more")] == ["class 7", "other"]
    assert second.class_label("door", "b:2", "a:1", "one more") == "one more"


def test_the_classes_of_many_pairs_of_models_share_a_label(open_table: OpenTable) -> None:
    """Each new version of a model makes a pair."""
    metrics = Metrics(open_table(), "0")
    labels = []
    for number in range(600):
        pair = "door", "b:1", f"a:{number // 40}"
        labels.append(metrics.class_label(*pair, f"class {number}"))
        metrics.shadow_boxes.add(1, *pair, labels[-1], "matched")

    assert (labels[499], labels[500], labels[-1]) == ("class 499", "other", "other")
