"""The gateway's own count of the images in its calls to Triton."""

import re
from collections import Counter

import pytest

from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics, render
from bench.harness.batch_sizes import read_batch_sizes
from bench.harness.errors import ContestantError
from tests.fakes.http import answering


def test_calls_are_counted_by_the_sizes_of_a_bucket() -> None:
    """Those of other models are left out; a model that was never called has none."""
    table = WorkerTable()
    metrics = Metrics(table, "0")
    for images in (1, 1, 2, 3, 4, 4, 8, 70):
        metrics.batch_size.observe(images, "null")
    metrics.batch_size.observe(5, "other")
    text, _ = render(metrics.collect(), "")
    table.close()

    with answering(text) as url:
        assert +read_batch_sizes(url, "null") == Counter({"1": 2, "2": 1, "3-4": 3, "5-8": 1, "65-": 1})
        assert +read_batch_sizes(url, "nobody") == Counter()


@pytest.mark.parametrize("body", [b"no metrics at all {", b"\xff"], ids=["text", "bytes"])
def test_metrics_that_cannot_be_read_are_one_line(body: bytes) -> None:
    with answering(body) as url, pytest.raises(ContestantError, match=re.escape(url)) as caught:
        read_batch_sizes(url, "null")

    assert "\n" not in str(caught.value)
