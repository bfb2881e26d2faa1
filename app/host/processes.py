"""Child processes: end them with all of their children, and with their parent."""

import ctypes
import os
import resource
import signal
import socket
import subprocess
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
# Loaded at import: a forked child cannot load it while another thread holds the loader's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)

MAX_CONNECTIONS = 16384
"""Maximum number of connections per worker, including idle ones."""
RESERVED_FILES = 64
"""Open files per worker that are not for connections: about 40 are in use, and Granian's accept loop spins without a free one."""
MAX_PASSED_ON = 512
"""Maximum number of a caller's requests that the host's workers pass on to search at the same time, each by its own connection;
fewer if others have some, and about a tenth more of all together (see `CallerCounts`)."""

SUPERVISED = "NEREID_INTERNAL_BEATS_FD"
"""Environment variable of a program whose parent kills it for an immediate stop, or if it writes nothing to this eventfd."""
SEARCH_SOCKET = "NEREID_INTERNAL_SEARCH_SOCKET"
"""Environment variable of the API's processes with the path of the socket of the one that searches beside the others."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Notifies a worker that it will be stopped soon."""
REPLACE_SIGNAL = signal.SIGUSR2
"""Notifies a worker that its successor serves, and that it will be stopped soon."""


def is_beside(search: str) -> bool:
    """Return whether this process searches beside others, which detect, given the setting `search`."""
    return search == "alone" and SEARCH_SOCKET in os.environ


def die_with_parent(parent: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send this process a signal when its parent, a process id, ends; or send it now if it has already ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def become_worker(parent: int) -> None:
    """Restore the default signal handlers in a new worker, and make the kernel kill it when its parent ends."""
    # The inherited handlers only record a signal, and a starting worker may ignore SIGTERM.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_DFL)
    for notice in (DRAIN_SIGNAL, REPLACE_SIGNAL):
        signal.signal(notice, signal.SIG_IGN)  # until the application handles it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent, signal.SIGKILL)


def end_group(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Terminate the leader of a process group, give it so many seconds to end, then kill the rest of the group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_group(process)


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process group, including children that outlive a killed leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def notify(state: str) -> None:
    """Tell systemd that a state such as `READY=1` or `WATCHDOG=1` holds, as sd_notify(3) says; without systemd, do nothing."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(1)  # a receiver that hangs does not stop this process
            sender.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)


def raise_file_limit() -> int:
    """Raise this process's limit of open files, usually 1024, to the hard limit, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(files: int) -> int:
    """Return the number of connections that a worker may have with this limit of open files."""
    return min(MAX_CONNECTIONS, max(files - RESERVED_FILES, 1))
