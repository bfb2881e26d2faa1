"""Processes that tests start: programs that they need, servers that a run shares, waits for their ends, and that none is left."""

import fcntl
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from app.settings.schema import PREFIX
from bench.harness.processes import ROOT, environment_of

PATIENCE_SECONDS = 280
"""For waits that a test's own limit does not end, such as those in other threads: they end a little earlier."""


def wait_for(condition: Callable[[], bool], seconds: float | None = None) -> None:
    """Wait until a condition holds; the test's own limit ends this, unless the seconds are part of what it tests."""
    if seconds is None:
        seconds = math.inf if threading.current_thread() is threading.main_thread() else PATIENCE_SECONDS
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for_search(url: str) -> None:
    """Wait until search answers, whose process starts later than the others."""
    wait_for(lambda: httpx.get(f"{url}/query/stats", timeout=60).status_code != 503)  # 401 without a key


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if nobody has collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(processes: Iterable[psutil.Process]) -> None:
    waited_for = list(processes)
    wait_for(lambda: all(has_ended(process) for process in waited_for))


def children() -> set[psutil.Process]:
    """Return all descendants of this process."""
    return set(psutil.Process().children(recursive=True))


@contextmanager
def no_process_left() -> Iterator[None]:
    before = children()
    yield
    wait_until_gone(children() - before)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Demand of every test of a module that imports this that none of its processes outlives it."""
    with no_process_left():
        yield


_USED = ExitStack()
"""What this process uses until the run has ended."""


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def share(folder: Path, serve: Callable[[], AbstractContextManager[str]]) -> str:
    """Let the first process that comes here serve for all until `leave`; all get the text that it yields.

    Starting a server takes as long as many tests that ask it. The folder is known to all processes. If the first one dies, which
    ends its servers, the next one that comes serves.
    """
    with one_process_at_a_time(folder):
        server, users = (_USED.enter_context((folder / name).open("a+", encoding="utf-8")) for name in ("server", "users"))
        try:
            fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = (folder / "text").read_text(encoding="utf-8")
        else:
            text = _USED.enter_context(serve())
            (folder / "text").write_text(text, encoding="utf-8")
            _USED.callback(fcntl.flock, users, fcntl.LOCK_EX)  # when the others have left
        fcntl.flock(users, fcntl.LOCK_SH)
    return text


def leave() -> None:
    """End what this process serves, once the others have left, too. No limit of a test holds here."""
    _USED.close()


def run_nereid(*arguments: object, **settings: object) -> "subprocess.CompletedProcess[str]":
    """Run a command of this checkout with these settings, and none of this process's own."""
    environment = environment_of(ROOT) | {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "app", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def require_program(name: str, package: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")  # which is not in every user's path
    if path is None:
        pytest.skip(f"{name} is not installed; on Debian: apt-get install {package}")
    return path


def obeying_modes() -> list[str]:
    """Return what precedes a command so that the modes of files are binding for it, even if root runs it."""
    return [] if os.getuid() else [require_program("setpriv", "util-linux"), "--bounding-set=-dac_override,-dac_read_search"]
