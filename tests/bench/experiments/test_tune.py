"""Tuning, as a user runs it: real processes, and a model that waits without using a CPU."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from app.settings.schema import Settings
from bench.__main__ import main
from bench.harness.model_control import ModelControl
from bench.harness.processes import ROOT, environment_of, variables
from bench.models.repository import write_fixture
from tests.processes import wait_for

MODEL = "wait_20"
INTERRUPTED = 130


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model repository with one instance of the model, which can do 20 images a second."""
    write_fixture(MODEL, tmp_path / "models")
    return tmp_path / "models"


@contextmanager
def _tuning(settings: dict[str, str], *options: str, seconds: int = 60) -> Iterator["subprocess.Popen[str]"]:
    environment = {**environment_of(ROOT), **settings, "NEREID_WORKERS": "1"}
    command = [sys.executable, "-m", "bench", "tune", MODEL, "--clients=8", f"--seconds={seconds}", *options]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.faults  # it compares throughputs
def test_tuning_finds_that_more_instances_do_more_and_writes_them(repository: Path) -> None:
    file = repository / MODEL / "config.pbtxt"
    before = file.read_text()
    with _tuning({"NEREID_MODEL_REPOSITORY": str(repository)}, "--write", seconds=10) as process:
        shown, errors = process.communicate()
    lines = shown.splitlines()

    assert process.returncode == 0, errors
    assert [line.split(maxsplit=4)[4] for line in lines if line.startswith("*")][0].startswith("instances 2")  # noqa: RUF015
    assert "-instance_group [ { count: 1 kind: KIND_CPU } ]" in lines
    assert file.read_text() == before.replace("count: 1", "count: 2")
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_triton_elsewhere_is_as_it_was_after_an_interruption(reloadable: Settings, number: int) -> None:
    control = ModelControl(reloadable, MODEL)
    before = control.read()
    with _tuning(variables(reloadable)) as process:
        wait_for(lambda: control.read() != before)
        process.send_signal(number)
        shown, errors = process.communicate()

    assert (process.returncode, shown) == (INTERRUPTED, "")
    assert errors.splitlines()[-1] == "stopped; the config is as it was"
    assert control.read() == before


def test_an_interruption_leaves_no_process_behind(repository: Path) -> None:
    file = repository / MODEL / "config.pbtxt"
    before = file.read_bytes()
    with _tuning({"NEREID_MODEL_REPOSITORY": str(repository)}, "--write") as process:
        tuning = psutil.Process(process.pid)
        wait_for(lambda: {"tritonserver", "nereid"} <= {child.name() for child in tuning.children()})
        family = tuning.children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert process.returncode == INTERRUPTED
    assert [child for child in family if child.is_running()] == []
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "nothing is not in .*models; ./just pull"),
        ({"NEREID_TRITON_ENDPOINTS": "127.0.0.1:1"}, "Triton does not read nothing: .*onnect"),
    ],
    ids=["embedded", "elsewhere"],
)
def test_a_model_that_is_not_there_is_one_line(
    settings: dict[str, str], reason: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda _number, _handler: None)
    for name, value in {"NEREID_MODEL_REPOSITORY": str(repository), **settings}.items():
        monkeypatch.setenv(name, value)

    assert main(["tune", "nothing"]) == 1
    assert re.search(reason, capsys.readouterr().err)


def test_a_config_that_triton_does_not_use_is_not_written(reloadable: Settings, repository: Path) -> None:
    file = repository / MODEL / "config.pbtxt"
    file.write_text(file.read_text().replace("count: 1", "count: 4"))
    settings = msgspec.structs.replace(reloadable, model_repository=str(repository))
    with _tuning(variables(settings), "--write") as process:
        _, errors = process.communicate()

    assert process.returncode == 1
    assert errors.startswith(f"{file} is not the config that Triton uses: instances 4, batch 1, K default; it uses: instances 1,")
