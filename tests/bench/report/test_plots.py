"""What a page draws of measurements."""

from bench.load.outcome import encode_latencies
from bench.report.plots import batch_plots, cpu_plot, latency_plot, stage_bar, stage_plot


def test_stages_stand_in_the_order_of_a_request() -> None:
    bar = stage_bar("a", {"total": 10.0, "infer": 4.0, "db": 1.0, "decode": 2.0}, "10 ms")

    assert list(bar.parts.items()) == [("decode", 2.0), ("infer", 4.0), ("db", 1.0), ("rest", 3.0)]
    assert "a: rest 3.00" in stage_plot([bar])


def test_only_the_first_latency_curves_are_drawn() -> None:
    """There are eight colours."""
    histograms = {str(number): [encode_latencies([0.001, 0.002])] for number in range(9)}

    assert latency_plot(histograms, dict.fromkeys(histograms, "red")).count("<polyline") == 8


def test_batch_sizes_of_a_name_without_executions_are_left_out() -> None:
    drawn = batch_plots({"a": {"1": 0}, "b": {"1": 1, "3": 1}})

    assert "a: mean" not in drawn
    assert "b: mean 2.00" in drawn


def test_cpu_time_is_labelled_with_its_sum() -> None:
    drawn = cpu_plot({"nereid": {"gateway": 2.0, "client": 1.0}})

    assert "3.00 ms" in drawn
    assert "nereid: gateway 2.00" in drawn
