"""Child processes: ended, and never left behind; how this program starts itself again, and which Python runs pip."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app import __version__
from app.host import interpreter, program
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES, connections_within, end_group, kill_group, notify
from app.host.program import CommandError
from app.host.signals import StopSignals
from tests.fakes.clock import Clock
from tests.processes import has_ended, nothing_left_running, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT

Process = subprocess.Popen[bytes]
LIVE = "while :; do sleep 0.05; done"
STUBBORN = f"trap '' TERM; {LIVE}"
VERSION = f"3.{sys.version_info.minor}"


@pytest.mark.parametrize(("how", "said"), [("", b"told\n"), (", signal.SIGKILL", b"")])
def test_child_ends_with_its_parent(how: str, said: bytes) -> None:
    code = f"""
import os, signal, subprocess
from functools import partial
from app.host.processes import die_with_parent
child = "trap 'echo told; exit' TERM; echo ready; {LIVE}"
subprocess.Popen(["sh", "-c", child], preexec_fn=partial(die_with_parent, os.getpid(){how}))
signal.pause()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == said


def test_child_ends_if_its_parent_has_ended_already() -> None:
    """The kernel signals only an end that comes later."""
    code = "from app.host.processes import die_with_parent; die_with_parent(1); print('alive')"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert (child.returncode, child.stdout) == (-signal.SIGTERM, b"")


@contextmanager
def running(command: str) -> Iterator[tuple[Process, str]]:
    """Run a shell command as the leader of a process group; yields also its first line."""
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().decode().strip()
    finally:
        kill_group(process)
        process.stdout.close()


@pytest.mark.parametrize(("trap", "seconds", "code"), [("exit 7", 20, 7), ("", 0.3, -signal.SIGKILL)])
def test_leader_may_end_by_itself_or_is_killed(trap: str, seconds: float, code: int) -> None:
    with running(f"trap '{trap}' TERM; echo ready; {LIVE}") as (process, _):
        start = time.monotonic()
        end_group(process, seconds)
        assert process.returncode == code
        assert code == 7 or time.monotonic() - start >= seconds
        end_group(process, 1)  # again


@pytest.mark.parametrize("leader", ["exec sleep 60", STUBBORN, "exit 0"], ids=["ends", "has to be killed", "has ended already"])
def test_child_left_by_the_leader_of_its_group_is_killed_and_no_other(leader: str) -> None:
    with running("echo; exec sleep 60") as (sleeper, _), running(f"({STUBBORN}) >/dev/null & echo $!; {leader}") as (process, line):
        left_behind = psutil.Process(int(line))
        if leader == "exit 0":
            process.wait()
        assert not has_ended(left_behind)
        end_group(process, 0.3)
        assert process.returncode is not None
        wait_until_gone([left_behind])
        assert sleeper.poll() is None


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    code = """
import resource
from app.host.processes import raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
hard = min(hard, 2000)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == "True\n"


@pytest.mark.parametrize(("files", "connections"), [(10**6, MAX_CONNECTIONS), (1024, 1024 - RESERVED_FILES), (RESERVED_FILES, 1)])
def test_connections_leave_files_for_the_worker_itself(files: int, connections: int) -> None:
    assert connections_within(files) == connections


def test_systemd_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("WATCHDOG=1")


def test_signals_at_once_are_one_and_the_first_tells_how_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signals = Clock(monkeypatch, "app.host.signals"), StopSignals()
    for after, number, count in (
        (0, signal.SIGINT, 1),
        (0.4, signal.SIGTERM, 1),
        (0.4, signal.SIGTERM, 1),
        (0.6, signal.SIGTERM, 2),
    ):
        clock.now += after
        signals.note(number)
        assert (signals.count, signals.first) == (count, signal.SIGINT)


def test_module_is_found_wherever_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the same name in the current folder or in PYTHONPATH, which is kept, does not take its place."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit(7)", encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command, environment = program.command("app", "--version"), program.environment()
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nereid {__version__}\n", "")
    assert environment["PYTHONPATH"] == f"{ROOT}:{tmp_path}"


def test_child_is_told_only_of_descriptors_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, descriptor in ("LAST_VALID", "7"), ("CACHE", "77"), ("BEATS", ""):
        monkeypatch.setenv(f"NEREID_INTERNAL_{name}_FD", descriptor)
    told = [{name for name in program.environment(given) if name.startswith("NEREID_INTERNAL_")} for given in ((), (7,))]
    assert told == [set(), {"NEREID_INTERNAL_LAST_VALID_FD"}]


def test_binary_runs_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "IS_ONE_FILE", True)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/own")
    monkeypatch.delenv("NEREID_INTERNAL_LAST_VALID_FD", raising=False)
    (tmp_path / "glibc").write_text("2.31", encoding="ascii")
    assert program.command("app", "api") == [sys.executable, "-m", "app", "api"]
    assert program.environment() == {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH_ORIG": "/usr/lib/own"}
    assert program.version().startswith(f"{__version__} (one file with Python 3.")
    assert program.version().endswith("; needs glibc 2.31 or later)")


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"13": "exit 1", "12": """echo '["3.10"]'""", "11": f"""echo '["{VERSION}", "/opt"]'""", "": "exit 1"}, "python3.11"),
        ({"13": "echo hello", "12": None, "11": f"""echo '["{VERSION}", "/opt"]'"""}, "python3.11"),
        ({"": f'exec {sys.executable} "$@"'}, "python3"),
        ({}, ""),
    ],
    ids=["without pip, or too old", "something else, or no program", "real", "none"],
)
def test_binary_takes_the_newest_python_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str | None], chosen: str
) -> None:
    own = interpreter.find("a wheel", "use --from")
    assert (own.path, own.version) == (sys.executable, VERSION)
    monkeypatch.setattr(program, "IS_ONE_FILE", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    for minor, line in programs.items():
        path = tmp_path / f"python3{minor and '.'}{minor}"
        path.write_bytes(b"\x7fELF?" if line is None else f"#!/bin/sh\n{line}\n".encode())
        path.chmod(0o755)
    if not chosen:
        with pytest.raises(
            CommandError, match=r"^a wheel needs Python 3.11, 3.12 or 3.13 with pip and venv, .*; otherwise use --from$"
        ):
            interpreter.find("a wheel", "use --from")
        return
    folders = own.library_folders if chosen == "python3" else [Path("/opt")]
    assert interpreter.find("a wheel", "use --from") == (str(tmp_path / chosen), VERSION, folders)
