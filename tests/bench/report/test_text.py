"""Runs as text."""

from bench.report.text import number, overview, sheet
from tests.bench.support import make_run


def test_the_sheet_describes_a_run_in_full() -> None:
    """Throughput, latency, errors, stages, CPU time, the model and Triton's batches are all there."""
    text = sheet(make_run())

    for part in ("requests/s", "mean", "p50", "p90", "p95", "p99", "max", "error rate", "200: 100", "decode 2.00", "gateway 3.00"):
        assert part in text
    assert "mean batch 2.50 (1: 10, 3: 30), queue 1.50 ms" in text
    assert "4 clients for 2.0 s, yolo11n" in text


def test_an_overview_has_a_line_for_each_run() -> None:
    text = overview([make_run(), make_run(clients=16)])

    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["4", "16"]
    assert text.count("yolo11n") == 1


def test_numbers_have_three_significant_digits() -> None:
    assert [number(value) for value in (1234.5, 123.4, 12.34, 1.234, None)] == ["1,234", "123", "12.3", "1.23", "-"]
