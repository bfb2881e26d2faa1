"""A lock that the processes of the embedded Triton share while they run networks; it tells each whether others do."""

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

_FLOCK = "hhqqi4x"  # of 64-bit Linux


class InferenceLock:
    """The lock of this process; the kernel releases it even if the process is killed."""

    def __init__(self, file: Path) -> None:
        """Open the file that is locked; raise OSError. Do not open the file elsewhere: closing it there would release the lock."""
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def take(self) -> None:
        """Tell others that this process runs a network."""
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)

    def release(self) -> None:
        """Tell others that this process no longer runs a network."""
        with suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1)

    def has_others(self) -> bool:
        """Return whether another process holds the lock, or may hold it on a file system without locks."""
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, question))
        except OSError:
            return True
        return bool(kind != fcntl.F_UNLCK)
