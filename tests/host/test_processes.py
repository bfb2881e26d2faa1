"""What this process may use; child processes, which are never left behind, other Pythons, ports and sockets."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from app import __version__
from app.host import cgroup, cores, interpreter, memory, program
from app.host.http import get, get_status
from app.host.ports import is_free, is_loopback, is_this_machine, remove_stale_socket, resolve
from app.host.processes import end_group, kill_group
from app.host.program import CommandError
from app.host.signals import StopSignals
from tests.fakes.http import listening_on, scripted
from tests.processes import PATIENCE_SECONDS, has_ended, nothing_left_running, wait_until_gone  # noqa: F401 - a fixture
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT, Clock, free_port

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


@pytest.mark.parametrize("leader", [STUBBORN, "exit 0", "exec sleep 60"])
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


def test_signals_at_once_are_one_and_the_first_tells_how_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signals = Clock(monkeypatch, "app.host.signals"), StopSignals()
    for after, number, count in ((0, signal.SIGINT, 1), (0.4, signal.SIGTERM, 1), (0.6, signal.SIGTERM, 2)):
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


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"13": "exit 1", "12": """echo '["3.10"]'""", "11": f"""echo '["{VERSION}", "/opt"]'"""}, "python3.11"),
        ({"13": "echo hello", "12": None, "": f'exec {sys.executable} "$@"'}, "python3"),
        ({}, ""),
    ],
    ids=["without pip, or too old", "something else, or no program, or the real one", "none"],
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
        with pytest.raises(CommandError, match=r"^a wheel needs Python 3.11, 3.12 or 3.13 with pip and venv, .*; otherwise use"):
            interpreter.find("a wheel", "use --from")
        return
    folders = own.library_folders if chosen == "python3" else [Path("/opt")]
    assert interpreter.find("a wheel", "use --from") == (str(tmp_path / chosen), VERSION, folders)


CORES = float(len(os.sched_getaffinity(0)))
HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SERVICE = "system.slice/nereid.service"
VERSION_2, NESTED = "0::/\n", f"0::/{SERVICE}\n"
VERSION_1 = f"4:memory:/{SERVICE}\n3:cpu,cpuacct:/{SERVICE}\n1:name=systemd:/{SERVICE}\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (VERSION_2, {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "900000000 100000\n", "memory.max": "1073741824\n"}, (CORES, 2**30)),
        (NESTED, {"cpu.max": "50000 100000\n", f"{SERVICE}/cpu.max": "25000 100000\n", "memory.max": "1\n"}, (0.25, 1)),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (CORES, HOST)),
        (VERSION_1, {f"cpu/{SERVICE}/cpu.cfs_quota_us": "1\n", f"cpu/{SERVICE}/cpu.cfs_period_us": "4\n"}, (0.25, HOST)),
        (VERSION_1, {f"memory/{SERVICE}/memory.limit_in_bytes": "1\n", "memory/memory.limit_in_bytes": "2\n"}, (CORES, 1)),
        (None, {"memory/memory.limit_in_bytes": "1073741824\n"}, (CORES, 2**30)),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], expected: tuple[float, int]
) -> None:
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")
    if own is not None:
        (tmp_path / "own").write_text(own, encoding="ascii")
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "own")
    assert (cores.available(), memory.available_bytes()) == expected


def test_images_have_an_eighth_of_the_memory_unless_it_is_set() -> None:
    """The largest image always has room."""
    eighth = memory.available_bytes() // 8
    assert [memory.image_budget(100, 1), memory.image_budget(0, 1), memory.image_budget(100, 2**30)] == [100 * 2**20, eighth, 2**30]


def test_workers_are_one_per_core_that_memory_is_enough_for_unless_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available", lambda: 8.5)
    for gibibytes, workers, instances, count in (
        (64, 0, 0, 8),
        (64, 0, 3, 2),
        (64, 0, 64, 1),
        (64, 5, 3, 5),
        (2, 0, 0, 3),
        (0.4, 0, 0, 1),
    ):
        monkeypatch.setattr(memory, "available_bytes", lambda gibibytes=gibibytes: int(gibibytes * 2**30))
        assert cores.workers(workers, instances) == count
        assert cores.workers_of_host(workers, instances) == count * max(1, instances)


ALL = "0.0.0.0"  # noqa: S104 - for a moment


@pytest.mark.parametrize(
    ("listens", "asked"),
    [("127.0.0.1", "127.0.0.1"), (ALL, "127.0.0.1"), ("127.0.0.1", ALL), pytest.param("::1", "::1", marks=NEEDS_IPV6)],
)
def test_port_is_in_use_while_someone_listens(listens: str, asked: str) -> None:
    """A connection that the server closed, which the kernel remembers for a minute, does not take the port, nor does asking."""
    with socket.create_server((listens, 0), family=socket.AF_INET6 if ":" in listens else socket.AF_INET) as server:
        port = server.getsockname()[1]
        assert not is_free(asked, port)
        with socket.create_connection((asked, port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert [is_free(asked, port) for _ in range(2)] == [True] * 2


def test_host_may_be_this_machine_or_loopback() -> None:
    for host, is_here in (("127.9.9.9", True), (ALL, True), (socket.gethostname(), True), ("203.0.113.1", False), ("a..b", False)):
        assert is_this_machine(host) is is_here
    assert [is_loopback(host) for host in ("127.9.9.9", ALL, "203.0.113.1")] == [True, False, False]


@NEEDS_IPV6
def test_ipv4_address_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server listens, and where it is looked for."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, *others, **how: look_up("::1", *others, **how) + look_up("127.0.0.1", *others, **how)
    )
    assert resolve("both") == "127.0.0.1"
    monkeypatch.setattr(socket, "socket", Mock(side_effect=OSError))  # the kernel has no IPv6
    assert resolve("::") == ALL


def test_socket_is_free_unless_someone_listens_there(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    assert remove_stale_socket(path)
    assert not remove_stale_socket(tmp_path / "folder" / "api.sock")
    with listening_on(path), socket.socket(socket.AF_UNIX) as client:
        assert not remove_stale_socket(path)
        client.connect(str(path))
    assert path.is_socket()
    assert remove_stale_socket(path)
    assert list(tmp_path.iterdir()) == []


def test_path_that_cannot_be_a_socket_is_an_error(tmp_path: Path) -> None:
    """What is no socket stays: a path that was mistyped may be that of a file which somebody needs."""
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    for path, message in (("file", "something else is there"), ("file/api.sock", "Not a directory"), ("x" * 108, "too long")):
        with pytest.raises(OSError, match=message):
            remove_stale_socket(tmp_path / path)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("place", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6), "socket"])
def test_status_is_that_of_the_answer_and_no_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A proxy in the environment is for other machines; a unix socket takes the place of host and port."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(os.environ, "no_proxy", "")
    path = tmp_path / "api.sock" if place == "socket" else None
    with scripted(204, 503, path=path, host="127.0.0.1" if path else place) as server:
        url = f"http://127.0.0.1:{free_port()}" if path else server.url
        assert get_status(url + "/livez", PATIENCE_SECONDS, path) == 204
        assert get(url, PATIENCE_SECONDS, path, key="ops.secret") == (503, "")
    assert [asked.partition(b"\r\n")[0] for asked in server.asked] == [b"GET /livez HTTP/1.1", b"GET / HTTP/1.1"]
    assert [b"X-API-Key: ops.secret\r\n" in asked for asked in server.asked] == [False, True]


@pytest.mark.parametrize("said", [b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n", None])
def test_server_that_does_not_answer_in_http_or_is_not_there_has_no_status(tmp_path: Path, said: bytes | None) -> None:
    for path in (None, tmp_path / "api.sock"):
        with scripted(said, path=path) as server:
            assert get_status(server.url, 0.2 if said is None else PATIENCE_SECONDS, path) is None
        assert get_status(server.url, PATIENCE_SECONDS, path) is None
