"""The stopwatch of a request, on a clock that the test sets."""

import threading
from collections.abc import Sequence
from time import perf_counter

import pytest

from app.telemetry.timing import DRAW, FETCH, STAGES, Timing


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

    assert list(timing.stages.items()) == [("read", 1250.0), ("decode", 250.0)]
    assert timing.intervals() == [("read", 750.0, 2000.0), ("decode", 500.0, 750.0)]
    assert timing.server_timing() == "read;dur=1250.00, decode;dur=250.00, total;dur=5000.00"


def test_stages_may_be_recorded_while_intervals_are_read(timing: Timing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding thread may still record a stage of a request that has timed out."""
    monkeypatch.setattr("app.telemetry.timing.perf_counter", perf_counter)
    is_done = threading.Event()

    def record() -> None:
        for index in range(20_000):
            timing.lap(f"stage {index}")
        is_done.set()

    recording = threading.Thread(target=record)
    recording.start()
    while not is_done.is_set():
        assert all(begin <= end for _, begin, end in timing.intervals())
    recording.join()
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
