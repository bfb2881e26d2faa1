"""Triton's own counters."""

import re

import pytest

from bench.harness.counters import Counters, CountersError, read_counters
from bench.report.measurements import TritonUse
from tests.fakes.http import answering

ZERO = Counters(inferences=0, executions=0, successes=0, compute_ns=0, waits=0, queue_ns=0, batches={})


def test_only_what_happened_in_the_meantime_counts() -> None:
    """Times are means over the requests of the meantime; batch sizes that did not occur are left out."""
    before = Counters(
        inferences=10, executions=4, successes=10, compute_ns=5_000_000, waits=10, queue_ns=9_000_000, batches={"1": 2, "4": 2}
    )
    after = Counters(
        inferences=18, executions=6, successes=18, compute_ns=21_000_000, waits=18, queue_ns=13_000_000, batches={"1": 2, "4": 4}
    )

    assert after.since(before) == TritonUse(inferences=8, executions=2, queue_ms=0.5, compute_ms=2.0, batches={"4": 2})
    assert after.since(before).mean_batch == 4


def test_a_model_that_did_nothing_divides_nothing_by_zero() -> None:
    assert ZERO.since(ZERO) == TritonUse(inferences=0, executions=0, queue_ms=0.0, compute_ms=0.0, batches={})


def test_what_triton_leaves_out_is_zero() -> None:
    version = b'{"name":"m","inference_count":"3","inference_stats":{"queue":{"count":3,"ns":6}}}'
    with answering(b'{"model_stats":[' + version + b"," + version + b"]}") as url:
        assert read_counters(url, "m") == ZERO._replace(inferences=6, waits=6, queue_ns=12)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"error":"unknown model"}', 400), (b"no JSON", 200), (b"[]", 200), (b"{}", 200)],
    ids=["refused", "broken", "list", "empty"],
)
def test_an_unusable_answer_is_one_line(body: bytes, status: int) -> None:
    with answering(body, status) as url, pytest.raises(CountersError, match=re.escape(url)) as caught:
        read_counters(url, "m")

    assert "\n" not in str(caught.value)
    assert status == 200 or "400 " in str(caught.value)
