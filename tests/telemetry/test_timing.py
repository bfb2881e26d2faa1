"""The stopwatch of a request, on a clock that the test sets, and the headers of a trace, as W3C Trace Context defines them."""

import threading
from collections.abc import Sequence

import pytest

from app.telemetry.timing import DRAW, FETCH, STAGES, Timing
from app.telemetry.trace_context import TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Timing:
    """Start at 10 s; the next readings are 10.5 s, 10.75 s, 12 s and 15 s."""
    monkeypatch.setattr("app.telemetry.timing.perf_counter", iter([10.0, 10.5, 10.75, 12.0, 15.0]).__next__)
    return Timing()


def test_stages_are_the_times_between_laps(timing: Timing) -> None:
    timing.lap("read")
    timing.start_lap()
    timing.lap("decode")
    assert timing.stages == {"read": 500.0, "decode": 1250.0}
    assert timing.intervals() == [("read", 0.0, 500.0), ("decode", 750.0, 2000.0)]
    assert timing.total == 5000.0


def test_the_last_lap_of_a_stage_counts(timing: Timing) -> None:
    for stage in ("read", "decode", "read"):
        timing.lap(stage)
    assert timing.intervals() == [("read", 750.0, 2000.0), ("decode", 500.0, 750.0)]
    assert timing.server_timing() == "read;dur=1250.00, decode;dur=250.00, total;dur=5000.00"


def test_stages_may_be_recorded_while_intervals_are_read() -> None:
    """A decoding thread may still record a stage of a request that has timed out."""
    timing = Timing()

    def record() -> None:
        for index in range(20_000):
            timing.lap(f"stage {index}")

    recording = threading.Thread(target=record)
    recording.start()
    while recording.is_alive():
        assert all(begin <= end for _, begin, end in timing.intervals())
    assert len(timing.intervals()) == 20_000


@pytest.mark.parametrize(
    ("ended", "begun", "failed"),
    [(["read", "model"], "", "queue"), (["read"], FETCH, FETCH), (STAGES, "", "post"), (STAGES, DRAW, DRAW)],
)
def test_a_failure_ends_the_stage_in_progress(ended: Sequence[str], begun: str, failed: str) -> None:
    timing = Timing()
    for stage in ended:
        timing.lap(stage)
    if begun:
        timing.begin(begun)
    assert timing.fail() == failed
    assert list(timing.stages) == list(dict.fromkeys([*ended, failed]))
    if len(ended) == 1:  # what has begun has ended
        assert timing.fail() == "model"


@pytest.mark.parametrize(
    ("version", "given", "known"),
    [
        *(("00", "01", "01"), ("00", "02", "02"), ("00", "ff", "03"), ("00", "08", "00")),
        *(("cc", "01-what the future will be like", "01"), ("fe", "01-", "01")),
    ],
)
def test_header_is_passed_on_without_unknown_flags_and_fields(version: str, given: str, known: str) -> None:
    context = parse(f"{version}-{TRACE}-{SPAN}-{given}")
    assert context == TraceContext(TRACE, SPAN, int(known, 16))
    assert context.traceparent == f"00-{TRACE}-{SPAN}-{known}"
    assert context.is_sampled is (known in {"01", "03"})


@pytest.mark.parametrize(
    "header",
    [
        *("", "x" * 100_000, f"00_{TRACE}_{SPAN}_01", f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01"),
        *(f"00-{TRACE}-{SPAN}{flags}" for flags in ("", "-1", "-001", "-0g", "-01-more", "-01\n")),
        *(f"{version}-{TRACE}-{SPAN}-01" for version in (" 00", "ff", "0")),
        *(f"00-{trace}-{SPAN}-01" for trace in (TRACE.upper(), "0" * 32, TRACE[1:], chr(0x660) * 32)),
        *(f"00-{TRACE}-{span}-01" for span in (SPAN.upper(), "0" * 16, f"{SPAN}0")),
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_a_malformed_header_is_none(header: str) -> None:
    assert parse(header) is None


@pytest.mark.parametrize(
    ("state", "passed_on"),
    [("a=1,b=x y", True), ("", False), ("x" * 512, True), ("x" * 513, False), ("a=\n", False), ("ä=1", False)],
)
def test_the_state_is_passed_on_if_it_can_be_a_header(state: str, *, passed_on: bool) -> None:
    """Without the state the trace is still valid."""
    context = parse(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None
    assert context.headers == (("traceparent", context.traceparent), *([("tracestate", state)] if passed_on else []))
