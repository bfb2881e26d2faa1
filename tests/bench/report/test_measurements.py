"""What is measured of a server under a load."""

from bench.report.measurements import Overload, WorkerMemory


def test_what_was_not_measured_under_overload_has_no_figure() -> None:
    """A server that does not answer afterwards has not recovered; a worker may have ended before its memory was read."""
    gone = WorkerMemory(seconds=[], resident_mib=[], proportional_mib=[])
    figures = Overload(phase="at_once", offered=10, peak=10, before_ms=5.0, memory=[gone]).figures()

    assert figures == {"offered/s": 10, "peak/s": 10}
