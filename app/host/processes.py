"""Child processes: wait until one answers, end it with everything it started, and never leave it behind."""

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress

from app.host.http import get_status

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
# Loaded once: a child that is being made while another thread holds the loader's lock could not.
_LIBC = ctypes.CDLL(None, use_errno=True)

MAX_CONNECTIONS = 16384
"""Of one worker, also idle ones."""
RESERVED_FILES = 64
"""Of one worker: about 40 are not connections, and Granian's accept loop would spin without a free one."""

SUPERVISED = "SUPERVISED"
"""Environment variable of a program whose parent kills it if it is to end at once."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Tells a worker that it will be stopped soon."""


def die_with_parent(parent: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends; also if it has ended already.

    Args:
        parent: Process id of the parent.
        how: The signal.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def wait_for_answer(
    url: str, process: "subprocess.Popen[bytes]", seconds: float = float("inf"), retry: Collection[int] = ()
) -> int | None:
    """Ask a server until it answers.

    Args:
        url: To get.
        process: The server.
        seconds: How long to try.
        retry: Statuses after which to ask again.

    Returns:
        The status of the answer; None if the process ended or the time is over.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        status = get_status(url, 1)
        if status is not None and status not in retry:
            return status
        time.sleep(_POLL_SECONDS)
    return None


def end_group(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End the leader of a process group, then kill whatever of the group is left.

    Args:
        process: Started with `start_new_session=True`.
        seconds: How long it may take to end by itself.
    """
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill whatever is left of a process group; children can outlive a leader that was killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as it may, and return it: the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(files: int) -> int:
    """Return how many connections a worker may have with that limit of open files."""
    return min(MAX_CONNECTIONS, max(files - RESERVED_FILES, 1))
