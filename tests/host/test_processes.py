"""What this process may use and what is installed; child processes, which are never left behind, and other Pythons."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

import psutil
import pytest

from app import __version__
from app.host import cgroup, cores, extras, interpreter, memory, program
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES, connections_within, end_group, kill_group
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


def test_connections_leave_files_for_the_worker_itself() -> None:
    assert [connections_within(files) for files in (10**6, 1024, RESERVED_FILES)] == [MAX_CONNECTIONS, 1024 - RESERVED_FILES, 1]


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
        (VERSION_2, {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, (0.5, 2**30)),
        (VERSION_2, {"cpu.max": "900000000 100000\n", "memory.max": f"{HOST + 1}\n"}, (CORES, HOST)),
        (NESTED, {"cpu.max": "50000 100000\n", f"{SERVICE}/cpu.max": "25000 100000\n", "memory.max": "1\n"}, (0.25, 1)),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (CORES, HOST)),
        (VERSION_1, {f"cpu/{SERVICE}/cpu.cfs_quota_us": "1\n", f"cpu/{SERVICE}/cpu.cfs_period_us": "4\n"}, (0.25, HOST)),
        (VERSION_1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, (CORES, HOST)),
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


@pytest.mark.parametrize(
    ("workers", "instances", "available", "count"),
    [(0, 3, 8, 2), (0, 64, 8, 1), (0, 0, 2.5, 2), (5, 3, 8, 5)],
)
def test_workers_are_one_per_core_unless_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, workers: int, instances: int, available: float, count: int
) -> None:
    monkeypatch.setattr(cores, "available", lambda: available)
    assert cores.workers(workers, instances) == count
    assert cores.workers_of_host(workers, instances) == count * max(1, instances)


def measure(program: str) -> list[float]:
    """Return the numbers that a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


def test_cores_are_those_of_the_scheduler_and_their_use_is_averaged_since_the_start() -> None:
    available, an_hour_later, least, busy = measure("""
import os, time
from app.host import cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
used, clock = time.process_time(), time.clock_gettime
busy = cores.used_percent()
time.clock_gettime = lambda which: clock(which) + 3600
print(cores.available(), cores.used_percent(), 100 * used / 60, busy)
""")
    assert available <= 1
    assert 0 < an_hour_later < least < busy <= 110


def test_freed_memory_is_used_again_and_that_of_a_burst_can_be_returned() -> None:
    """A block of 4 MiB is not mapped and zeroed again for each allocation, as it is with the defaults of glibc."""
    default, kept, returned = measure("""
import resource
from app.host import allocator, memory

def faults():
    for _ in range(3):
        for _ in range(20):
            block = bytes(4 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            block = None
            block = bytes(4 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
allocator.keep_freed_memory()
kept = faults()
burst = [bytes(100_000) for _ in range(2000)]
last = bytes(100_000)
del burst
before = memory.resident_bytes()
allocator.return_freed_memory()
print(default, kept, before - memory.resident_bytes())
""")
    assert kept < default / 10
    assert returned > 100 << 20


def test_extras_are_those_of_the_package() -> None:
    declared: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = declared.pop("all")
    distributions = packages_distributions()
    assert set(re.split(r"[\[\],]", everything)[1:-1]) | {"cache"} == declared.keys()
    assert extras.MODULES.keys() == declared.keys() - {"models"}
    for extra, modules in extras.MODULES.items():
        named = " ".join(declared[extra]).replace("nereid-gateway[cache]", " ".join(declared["cache"]))
        for module in modules:
            assert any(name.replace("_", "-") in named for name in distributions[module.partition(".")[0]])


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from app.host import extras
missing = [extras.missing(extra) for extra in {extras}]
loaded = {{each for modules in extras.MODULES.values() for each in modules}} & {{*sys.modules}} - {absent}
print(missing, loaded)
"""


@pytest.mark.parametrize(
    ("names", "absent", "missing"),
    [
        ([*extras.MODULES], [], [""] * len(extras.MODULES)),
        (["search"], ["asyncpg", "pgvector", "redis"], ["asyncpg, pgvector"]),
        (["otel"], ["opentelemetry"], ["opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http"]),
    ],
)
def test_missing_modules_of_an_extra_are_named_without_importing_others(
    names: list[str], absent: list[str], missing: list[str]
) -> None:
    program = PROGRAM.format(extras=names, absent=set(absent))
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ran.stdout == f"{missing} set()\n"
