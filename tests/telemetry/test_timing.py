"""The stopwatch, on a clock that is told the time."""

import pytest

from app.stages import Stages


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Start at 10 s; the next readings are 10.5 s, 10.75 s and 12 s."""
    monkeypatch.setattr("app.stages.perf_counter", iter([10.0, 10.5, 10.75, 12.0]).__next__)
    return Stages()


def test_laps_follow_each_other(stages: Stages) -> None:
    """Each lap is the time since the one before it, the first since the start."""
    stages.lap("read")
    stages.lap("decode")

    assert stages.milliseconds == {"read": 500.0, "decode": 250.0}


def test_total_counts_from_the_start(stages: Stages) -> None:
    """Laps do not move the start, and asking for the total is no lap."""
    stages.lap("read")

    assert stages.total == 750.0

    stages.lap("decode")

    assert stages.milliseconds["decode"] == 1500.0


def test_last_lap_of_a_name_counts(stages: Stages) -> None:
    """A stage booked twice has the later time, in its first place."""
    stages.lap("read")
    stages.lap("decode")
    stages.lap("read")

    assert list(stages.milliseconds.items()) == [("read", 1250.0), ("decode", 250.0)]


def test_server_timing_lists_the_stages_and_their_total(stages: Stages) -> None:
    """The header has one metric for each stage, in order, and `total`."""
    stages.lap("read")
    stages.lap("decode")

    assert stages.server_timing() == "read;dur=500.00, decode;dur=250.00, total;dur=2000.00"


def test_server_timing_without_stages_is_the_total(stages: Stages) -> None:
    """A request that fails at once still has its time."""
    assert stages.server_timing() == "total;dur=500.00"
