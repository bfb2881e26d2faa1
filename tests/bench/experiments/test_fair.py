"""What a caller notices of another one who sends all it can."""

from collections import Counter

import pytest

from bench.__main__ import main
from bench.experiments.fair import Row, describe
from bench.harness.processes import ROOT
from bench.load.callers import Answers


@pytest.mark.parametrize(
    ("served", "milliseconds", "holds"),
    [(49, [60.0, 240.0], "yes"), (48, [60.0, 240.0], "NO"), (49, [61.0, 240.0], "NO"), (49, [60.0, 241.0], "NO")],
)
def test_a_row_holds_if_b_is_served_nearly_as_alone(served: int, milliseconds: list[float], holds: str) -> None:
    beside = Answers(Counter({"200": served, "429": 50 - served}), milliseconds)
    row = Row("detect", Answers(Counter({"200": 2}), [10.0, 20.0]), beside, Counter({"200": 30, "429": 5}), 2.0)
    _, _, line, note = describe([row]).splitlines()

    assert line.split()[:3] == ["detect", "15.0", f"{served}/50"]
    assert line.split()[-1] == holds
    assert note == f"detect: A 30 x 200, 5 x 429; B {served} x 200, {50 - served} x 429"


def test_an_unknown_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fair", "--only", "detect,nothing"])

    assert "there is no row nothing" in capsys.readouterr().err


def test_rows_go_from_the_command_line_to_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bench.experiments.fair._LEAD_SECONDS", 0.5)
    monkeypatch.setattr("bench.experiments.fair._WARM_UP_SECONDS", 0.5)
    options = ["--seconds", "0.7", "--workers", "1", "--share", "0.2", "--checkout", str(ROOT)]

    assert main(["fair", "--only", "deepstack,unauthorized", *options]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert [line.split()[0] for line in lines[2:4]] == ["deepstack", "unauthorized"]
    (wrong,) = [line for line in lines if line.startswith("unauthorized: ")]
    assert " x 401" in wrong
    assert "200" not in wrong.partition(";")[0]


def test_equal_callers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fair", "--callers", "3", "--seconds", "1", "--workers", "1"]) == 0

    assert capsys.readouterr().out.startswith("3 callers, ")
