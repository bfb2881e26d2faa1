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
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_HELD_BYTES = 1 << 20
"""Kept for a reader that stalls, per process and stream; what does not fit is lost."""
_LAST_SECONDS = 1.0
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
            # Opened anew, because others that share the descriptor may not expect that it does not wait. A pipe or terminal of
            # another user cannot be; there a write could wait for what another process has filled since it was asked.
            with suppress(OSError):
                self._target = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                self._asks = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        # In a fork, too: what is held is written by the process that has said it, in which another thread may have the lock.
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
            if lines and self._draining is None:
                with suppress(RuntimeError):  # no thread can be started: a later line tries it again
                    thread = threading.Thread(target=self._drain, daemon=True)
                    thread.start()
                    self._draining = thread
        return nbytes

    def finish(self) -> None:
        """Give the reader a moment for what is held, before this process ends."""
        if (draining := self._draining) is not None:
            draining.join(_LAST_SECONDS)

    def _is_ready(self, milliseconds: int | None = None) -> bool:
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        return bool(poll.poll(milliseconds))

    def _drain(self) -> None:
        while True:
            self._is_ready()
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
                if self._asks and not self._is_ready(0):
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
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            continue  # it is closed, or a file, for which no write waits for a reader
        report = event if name == "stdout" and not stream.isatty() else text
        buffer = io.BufferedWriter(PatientStream(stream.fileno(), report))
        setattr(sys, name, io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True))
    finish_at_end()


def finish_at_end() -> None:
    """Let this process wait a moment at its end for whoever reads its streams; a fork, too, has to ask for it."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, PatientStream):
            Finalize(None, raw.finish, exitpriority=0)
