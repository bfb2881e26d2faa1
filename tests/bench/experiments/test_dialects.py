"""What dialects cost, and answers in time for Frigate."""

import pytest

from app.settings.schema import DIALECTS
from bench.__main__ import main
from bench.experiments import dialects
from bench.experiments.dialects import Round, Spent, describe
from bench.load.dialects import PAIRS
from bench.load.images import SAMPLE_FOLDER


def test_a_dialect_is_described_by_the_medians_of_its_differences() -> None:
    """Of latency and CPU time, each with the middle half; one round is its own median."""
    rounds = [Round(Spent(100 + noise, 50 + noise), Spent(120 + 3 * noise, 40 + noise)) for noise in (0, 10, 30)]
    _, _, several, one = describe({"several": rounds, "one": rounds[:1]}).splitlines()

    assert several.split() == ["several", "110", "150", "40", "(20..80)", "-10", "(-10..-10)"]
    assert one.split() == ["one", "100", "120", "20", "(20..20)", "-10", "(-10..-10)"]


@pytest.mark.system
def test_every_dialect_of_the_server_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a real gateway and a real Triton; the others are left out, as is a model that has not been pulled."""
    monkeypatch.setattr(dialects, "pulled", lambda _: None)
    assert main(["dialects", "--rounds", "2", "--seconds", "0.3", "--images", str(SAMPLE_FOLDER)]) == 0
    lines = capsys.readouterr().out.splitlines()
    measured = [name for name in PAIRS if name in DIALECTS]

    assert [line.split()[0] for line in lines[2 : 3 + len(measured)]] == ["(none)", *measured]
    assert [line.partition(" is left out: ")[0] for line in lines if " is left out: the server does not have /" in line] == [
        name for name in PAIRS if name not in DIALECTS
    ]
    assert [line.split()[:2] for line in lines if line.startswith("sim_gpu")] == [
        ["sim_gpu", str(clients)] for clients in (1, 2, 4)
    ]
    assert all(line.endswith("%") for line in lines if line.startswith("sim_gpu"))
    assert lines[-1] == "yolo11n is left out: it has not been pulled; run: ./just pull yolo11n"
