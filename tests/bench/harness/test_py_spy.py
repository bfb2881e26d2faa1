"""The recording of a process by py-spy."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.errors import ContestantError
from bench.harness.py_spy import recording


def test_an_idle_process_has_no_flame_graph(tmp_path: Path) -> None:
    """py-spy fails, but a service without requests is no error."""
    idle = "import signal; print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", idle], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with recording(process.pid, 1, tmp_path / "out.svg"):
            pass
        process.kill()

    assert not (tmp_path / "out.svg").exists()


def test_a_process_that_cannot_be_recorded_is_an_error_with_the_reason_of_py_spy(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(ContestantError, match="py-spy: Failed to find"), recording(process.pid, 1, tmp_path / "out.svg"):
            pass
        process.kill()


def test_without_py_spy_the_error_names_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContestantError, match=r"run: \./just"), recording(1, 1, tmp_path / "out.svg"):
        pass
