"""The recording of a process by py-spy."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness.errors import ContestantError
from bench.harness.py_spy import recording
from tests.bench.support import needs_ptrace


@contextmanager
def running(*command: str) -> Iterator[int]:
    """Run a program that prints something when it is ready; yields its id."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


@needs_ptrace
def test_an_idle_process_has_no_flame_graph(tmp_path: Path) -> None:
    """py-spy fails, but a service without requests is no error."""
    idle = "import signal; print(flush=True); signal.pause()"
    with running(sys.executable, "-c", idle) as pid, recording(pid, 1, tmp_path / "out.svg"):
        pass

    assert not (tmp_path / "out.svg").exists()


@needs_ptrace
def test_a_process_that_cannot_be_recorded_is_an_error_with_the_reason_of_py_spy(tmp_path: Path) -> None:
    with (
        running("sh", "-c", "echo; exec sleep 600") as pid,
        pytest.raises(ContestantError, match="py-spy: Failed to find"),
        recording(pid, 1, tmp_path / "out.svg"),
    ):
        pass


def test_without_py_spy_the_error_names_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContestantError, match=r"run: \./just"), recording(1, 1, tmp_path / "out.svg"):
        pass
