"""Processes that tests start: wait for them, and make sure that none is left."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

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
    """Check that every process started in the block ends."""
    before = children()
    yield
    wait_until_gone(children() - before)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Demand of every test of a module that imports this that none of its processes outlives it."""
    with no_process_left():
        yield
