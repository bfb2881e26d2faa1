"""The contests that `bench versus` plans."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.versus import Plan, make_plans
from bench.harness.lineup import NAMES
from bench.harness.processes import ROOT
from bench.load.images import SAMPLE_FOLDER
from bench.report.contest_text import contest_text
from bench.report.records import load_record


def plan(kind: str, model: str = "null", only: tuple[str, ...] = (), before: Path | None = None) -> Plan:
    return next(make_plans([kind], model, 32, only, before))


def test_the_server_with_its_own_network_takes_part_only_with_the_real_model() -> None:
    """`in_process` does not use Triton, so it cannot run the fixtures."""
    assert [name for name, _ in plan("load", "yolo11n").contestants] == list(NAMES)
    assert [name for name, _ in plan("load", "null").contestants] == [name for name in NAMES if name != "in_process"]


def test_without_triton_both_tasks_are_compared_in_one_run() -> None:
    plans = list(make_plans(["in_process"], "null", 32, ()))

    assert [(plan.contestants[0], plan.clients) for plan in plans] == [
        (("in_process", model), clients) for model in ("yolo11n", "efficientnet_lite0") for clients in (1, 6)
    ]
    assert {name for plan in plans for name, _ in plan.contestants} == {"in_process", "nereid_inline", "nereid_shm"}


def test_with_another_checkout_every_contestant_of_nereid_has_a_counterpart() -> None:
    only = ("reference", "nereid_shm", "nereid_file")
    expected = ["reference", "nereid_shm", "nereid_shm@before", "nereid_file", "nereid_file@before"]

    assert plan("load", only=only, before=Path("/other")).contestants == [(name, "null") for name in expected]
    assert [name for name, _ in plan("load", only=only).contestants] == list(only)
    assert plan("batching", only=only, before=Path("/other")).contestants == [
        ("batch1", "sim_gpu_batch1"),
        ("nereid_file", "sim_gpu"),
        ("nereid_file@before", "sim_gpu"),
    ]


@pytest.mark.parametrize("command", ["versus", "stages", "overload"])
def test_a_folder_that_is_not_a_checkout_is_rejected(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--before", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path} is not a checkout of this project: it has no app/__main__.py\n"


def test_a_contest_goes_from_the_command_line_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    options = ["--rounds", "1", "--seconds", "0.3", "--clients", "2", "--workers", "1", "--only", "nereid_shm"]

    assert main(["versus", *options, "--images", str(SAMPLE_FOLDER), "--before", str(ROOT), "--json", str(file)]) == 0
    record = load_record(file)
    (contest,) = record.contests
    assert record.runs == []
    assert record.settings["before"] == str(ROOT)
    assert [(entry.name, entry.model) for entry in contest.entries] == [("nereid_shm", "null"), ("nereid_shm@before", "null")]
    assert contest_text(contest) in capsys.readouterr().out
