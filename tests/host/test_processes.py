"""Child processes: ended, and never left behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES, connections_within, end_group, kill_group, notify
from tests.processes import has_ended, nothing_left_running, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT

Process = subprocess.Popen[bytes]


@pytest.mark.parametrize(("how", "said"), [("", b"told\n"), (", signal.SIGKILL", b"")])
def test_child_ends_with_its_parent(how: str, said: bytes) -> None:
    code = f"""
import os, signal, subprocess
from functools import partial
from app.host.processes import die_with_parent
child = "trap 'echo told; exit' TERM; echo ready; while :; do sleep 0.05; done"
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
def running(command: str) -> Iterator[Process]:
    """Run a shell command as the leader of a process group; its output is a pipe."""
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        kill_group(process)
        assert process.stdout is not None
        process.stdout.close()


def read_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_leader_may_end_by_itself(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    with running(f"trap 'touch {cleaned}; exit 7' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert read_line(process) == "ready"
        end_group(process, 20)

        assert process.returncode == 7
        assert cleaned.exists()


def test_leader_that_ignores_the_signal_is_killed() -> None:
    with running("trap '' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert read_line(process) == "ready"
        start = time.monotonic()
        end_group(process, 0.3)

        assert process.returncode == -signal.SIGKILL
        assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize(
    "leader",
    ["exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done", "exit 0"],
    ids=["ends", "has to be killed", "has ended already"],
)
@pytest.mark.parametrize("child", ["exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done"], ids=["mild", "stubborn"])
def test_child_left_by_the_leader_of_its_group_is_killed(leader: str, child: str) -> None:
    with running(f"({child}) >/dev/null & echo $!; {leader}") as process:
        left_behind = psutil.Process(int(read_line(process)))
        if leader == "exit 0":
            process.wait()
        assert not has_ended(left_behind)
        end_group(process, 0.3)

        assert process.returncode is not None
        wait_until_gone([left_behind])


def test_group_that_has_ended_may_be_ended_again() -> None:
    with running("exit 5") as process:
        process.wait()
        end_group(process, 1)
        kill_group(process)

        assert process.returncode == 5


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


@pytest.mark.parametrize(
    ("files", "connections"), [(10**6, MAX_CONNECTIONS), (1024, 1024 - RESERVED_FILES), (RESERVED_FILES, 1), (3, 1)]
)
def test_connections_leave_files_for_the_worker_itself(files: int, connections: int) -> None:
    assert connections_within(files) == connections


def test_other_groups_are_not_killed() -> None:
    with running("exec sleep 60") as sleeper, running("exec sleep 60") as process:
        kill_group(process)

        assert process.returncode == -signal.SIGKILL
        assert sleeper.poll() is None


def test_systemd_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))

    notify("WATCHDOG=1")
