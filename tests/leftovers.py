"""What the tests must not leave behind: a run processes and files, a module locks, memory and threads."""

import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.settings.schema import Settings
from app.triton.shared_memory import SHM
from tests.processes import has_ended

_MARK = "TESTS_OF_NEREID"
_PREFIX = "nereid-tests-"
_OF_OTHERS = _PREFIX, "nereid-bench-"  # runs and measurements beside this run, whose temporary files are in its own folder
_SOCKETS = "nereid-triton-", "nereid-postgres-"
_THREADS = "check_", "decode_", "resolve_"
_GRACE_SECONDS = 30

_held_by_session = set[str]()


class Run:
    """One run of the tests, in all of its processes: they have a folder for temporary files, and a mark in their environment."""

    def __init__(self) -> None:
        """Begin a run; what is started from now on belongs to it."""
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.folder.chmod(0o711)  # root's PostgreSQL is run by another user
        os.environ["TMPDIR"] = os.environ[_MARK] = str(self.folder)
        tempfile.tempdir = None  # looked up again
        self._before = _named_files()

    def leftovers(self, grace_seconds: float = 10) -> list[str]:
        """Name what the run has left, and what is not gone in a while; folders of programs' sockets, if something is in them."""
        sockets = self._sockets()
        until = time.monotonic() + grace_seconds
        named = self._named(sockets)
        while named and time.monotonic() < until:
            time.sleep(0.1)
            named &= self._named(sockets)
        return sorted(named)

    def _named(self, sockets: set[Path]) -> set[str]:
        for path in _named_files() - self._before:
            if path.name.startswith(_SOCKETS):
                _remove_unused(path)
        files = {path for path in self.folder.iterdir() if not path.name.startswith("pytest-of-")}
        new = {path for path in _named_files() - self._before if path in sockets or not path.name.startswith(_SOCKETS)}
        if new:
            files |= {path for path in new - _used_files() if not _is_of_others(path)}
        return {f"file {path}" for path in files} | {
            f"process {process.pid}: {' '.join(process.info['cmdline'] or '?')}"
            for process in psutil.process_iter(["environ", "cmdline"])  # what another user's process does not tell is None
            if (process.info["environ"] or {}).get(_MARK) == str(self.folder)
            and process.pid != os.getpid()
            and not has_ended(process)
        }

    def _sockets(self) -> set[Path]:
        """Return the folders that programs with a home in this run's folder have for their sockets, unlike those of other runs."""
        homes = [Settings(triton_home=path, database_home=path) for path, _, _ in os.walk(self.folder)]
        return {folder for home in homes for folder in (home.triton_folder, home.database_folder)}

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a program's socket if it is empty, and no program has locked it, such as one of another run."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rmdir()
        finally:
            os.close(descriptor)


def _named_files() -> set[Path]:
    """List this user's files that the program names after itself, outside of the temporary folder of a run."""
    found = {path for folder in (SHM, Path("/tmp"), Path("/var/tmp"), Path("/run/netns")) for path in folder.glob("nereid[-_]*")}  # noqa: S108
    return {path for path in found if not path.name.startswith(_OF_OTHERS) and _is_own(path)}


def _is_own(path: Path) -> bool:
    try:
        return os.getuid() in {0, path.lstat().st_uid}  # root's PostgreSQL belongs to another user
    except OSError:  # removed meanwhile
        return False


def _is_of_others(path: Path) -> bool:
    """Return whether a network of the kernel is named after another living process, such as other tests."""
    named = re.fullmatch(r"/run/netns/nereid-(\d+)-.*", str(path))
    return named is not None and int(named[1]) != os.getpid() and psutil.pid_exists(int(named[1]))


def _used_files() -> set[Path]:
    """List what other living processes use, such as a bench beside the tests: files in shared memory, and folders of open files."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
            found |= {Path(line[line.index("/") :]) for line in lines if str(SHM) in line}
            if process.name != str(os.getpid()):
                found |= {folder for file in (process / "fd").iterdir() for folder in file.readlink().parents}
        except OSError:  # ended, or another user's
            continue
    return found


def held() -> set[str]:
    """Name the threads of the program in this process, and its descriptors of what it has locked and of its files in memory.

    Arenas are left out: an application of the session makes one when it needs it.
    """
    names = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.name.startswith(_THREADS)}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = f"{descriptor.readlink()}"
            is_locked = "FLOCK" in Path("/proc/self/fdinfo", descriptor.name).read_text(encoding="ascii")
            if target.startswith("/memfd:nereid-") or (is_locked and not target.startswith(f"{SHM}/nereid-{os.getpid()}-")):
                names.add(f"{target} ({descriptor.name})")
    return names


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Note what the fixtures of the session hold: that outlives modules."""
    if fixturedef.scope != "session":
        return (yield)
    before = held()
    try:
        return (yield)
    finally:
        _held_by_session.update(held() - before)


@pytest.fixture(autouse=True, scope="module")
def nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """Demand of every module that nothing is held that was not before; what is about to end is waited for."""
    before = held()
    yield
    until = time.monotonic() + _GRACE_SECONDS
    while (left := held() - before - _held_by_session) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left, f"{request.node.name} has left behind {', '.join(sorted(left))}"
