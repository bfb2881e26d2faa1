"""Standard streams for servers: whoever reads the log may stall, which must not stop detection."""

import io
import os
import select
import socket
import stat
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_HELD_BYTES = 1 << 20
"""Kept for a reader that stalls, per process and stream; what does not fit is lost."""
_PIPE_BYTES = 4096
"""A pipe takes a write of this size whole, or not at all (PIPE_BUF)."""


class PatientStream(io.RawIOBase):
    """A file descriptor of which no write waits: a thread writes the rest when its reader goes on. Thread-safe."""

    def __init__(self, descriptor: int, report: str) -> None:
        """Write to a descriptor; `report` is a line about `{lines}` that were lost, written when that has ended."""
        self._descriptor, self._report = descriptor, report
        self._socket = socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
        self._target, self._asks = descriptor, self._socket is None
        if self._asks:
            # Opened anew, because others that share the descriptor may not expect that it does not wait. A container's may be
            # another user's; then a write could wait for a pipe that another process has filled since it was asked.
            with suppress(OSError):
                self._target = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                self._asks = False
        self._lock = threading.RLock()
        self._held: deque[bytes] = deque()
        self._held_bytes = self._lost = 0
        self._draining: threading.Thread | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: "ReadableBuffer") -> int:
        """Write whole lines, now or later; return how many bytes they have. Errors are ignored: the disk may be full."""
        lines = bytes(data)
        nbytes = len(lines)
        with self._lock:
            if not self._held and not self._lost:
                lines = self._write(lines)
            if lines and self._held_bytes + len(lines) <= _HELD_BYTES and not self._lost:
                self._held.append(lines)
                self._held_bytes += len(lines)
            elif lines:
                self._lost += lines.count(b"\n")
            if lines and (self._draining is None or not self._draining.is_alive()):  # it does not live on in a fork
                self._draining = threading.Thread(target=self._drain, daemon=True)
                self._draining.start()
        return nbytes

    def _drain(self) -> None:
        while True:
            select.select([], [self._target], [])
            with self._lock:
                while self._held:
                    rest = self._write(self._held[0])
                    self._held_bytes -= len(self._held[0]) - len(rest)
                    if rest:
                        self._held[0] = rest
                        break
                    self._held.popleft()
                else:
                    if not self._lost:
                        self._draining = None
                        return
                    self._held.append(self._report.format(lines=self._lost).encode())
                    self._held_bytes, self._lost = len(self._held[0]), 0

    def _write(self, data: bytes) -> bytes:
        """Write what is taken at once; return the rest."""
        view = memoryview(data)
        try:
            while view:
                if self._asks and not select.select([], [self._target], [], 0)[1]:
                    break
                part = view[:_PIPE_BYTES]
                view = view[self._socket.send(part, socket.MSG_DONTWAIT) if self._socket else os.write(self._target, part) :]
        except BlockingIOError:
            pass
        except OSError:
            return b""
        return bytes(view)


def never_wait() -> None:
    """Let no write to stdout or stderr of this process and its forks wait for whoever reads them."""
    text = "nereid: {lines} lines were lost here, because nothing read them\n"
    event = '{{"event":"lines of the log were lost, because nothing read them","lines":{lines},"level":"warning"}}\n'
    for name, report in (("stdout", text if sys.stdout.isatty() else event), ("stderr", text)):
        with suppress(OSError):  # one that is closed
            if stat.S_ISREG(os.fstat(getattr(sys, name).fileno()).st_mode):
                continue  # no write to a file waits for a reader
            stream = io.BufferedWriter(PatientStream(getattr(sys, name).fileno(), report))
            setattr(sys, name, io.TextIOWrapper(stream, errors="backslashreplace", line_buffering=True))
