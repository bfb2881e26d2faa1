"""The stopwatch of a request, on a clock that the test sets."""

import threading
from time import perf_counter

import pytest

from app.telemetry.timing import DRAW, FETCH, STAGES, Timing


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Timing:
    """Start at 10 s; the next readings are 10.5 s, 10.75 s, 12 s and 15 s."""
    monkeypatch.setattr("app.telemetry.timing.perf_counter", iter([10.0, 10.5, 10.75, 12.0, 15.0]).__next__)
    return Timing()


def test_laps_follow_each_other(timing: Timing) -> None:
    """Each lap is the time since the one before it, the first since the start."""
    timing.lap("read")
    timing.lap("decode")

    assert timing.stages == {"read": 500.0, "decode": 250.0}


def test_total_is_the_time_since_the_start(timing: Timing) -> None:
    """Laps do not change the total, and reading the total is not a lap."""
    timing.lap("read")

    assert timing.total == 750.0

    timing.lap("decode")

    assert timing.stages["decode"] == 1500.0


def test_time_before_a_started_lap_belongs_to_no_stage(timing: Timing) -> None:
    """`start_lap` drops the time since the last lap, but not from the total."""
    timing.lap("read")
    timing.start_lap()
    timing.lap("decode")

    assert timing.stages == {"read": 500.0, "decode": 1250.0}
    assert timing.total == 5000.0


def test_last_lap_of_a_stage_counts(timing: Timing) -> None:
    """A stage that is recorded twice has the later time, in its first place."""
    timing.lap("read")
    timing.lap("decode")
    timing.lap("read")

    assert list(timing.stages.items()) == [("read", 1250.0), ("decode", 250.0)]


def test_server_timing_lists_the_stages_and_their_total(timing: Timing) -> None:
    timing.lap("read")
    timing.lap("decode")

    assert timing.server_timing() == "read;dur=500.00, decode;dur=250.00, total;dur=2000.00"


def test_server_timing_without_stages_is_the_total(timing: Timing) -> None:
    assert timing.server_timing() == "total;dur=500.00"


def test_intervals_tell_when_each_stage_began_and_ended(timing: Timing) -> None:
    """In milliseconds since the start; the time that belongs to no stage is between them."""
    timing.lap("read")
    timing.start_lap()
    timing.lap("decode")

    assert timing.intervals() == [("read", 0.0, 500.0), ("decode", 750.0, 2000.0)]


def test_interval_of_a_repeated_stage_is_the_last_one(timing: Timing) -> None:
    timing.lap("read")
    timing.lap("decode")
    timing.lap("read")

    assert timing.intervals() == [("read", 750.0, 2000.0), ("decode", 500.0, 750.0)]


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


def test_a_failure_ends_the_stage_in_progress(timing: Timing) -> None:
    """The time since the last lap belongs to the first stage that has not ended."""
    timing.lap("read")
    timing.lap("model")

    assert timing.fail() == "queue"
    assert list(timing.stages) == ["read", "model", "queue"]


def test_a_failure_ends_the_stage_that_has_begun() -> None:
    timing = Timing()
    timing.lap("read")
    timing.begin(FETCH)

    assert timing.fail() == FETCH
    assert list(timing.stages) == ["read", FETCH]
    assert timing.fail() == "model"


def test_a_failure_after_all_stages_belongs_to_the_last_one() -> None:
    """No stage follows it, unless `begin` names one."""
    timing = Timing()
    for stage in STAGES:
        timing.lap(stage)

    assert timing.fail() == "post"
    assert list(timing.stages) == list(STAGES)
    timing.begin(DRAW)
    assert timing.fail() == DRAW
