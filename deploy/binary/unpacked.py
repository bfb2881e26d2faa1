"""The temporary folder into which the one file has unpacked itself."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Longer than unpacking takes, during which a folder is not locked yet.
_ABANDONED_SECONDS = 600


@contextmanager
def kept(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Keep a folder from being removed while it is used, be it by systemd-tmpfiles, which passes locked ones over.

    Raises:
        BlockingIOError: With LOCK_NB, it is in use; without, this waits for systemd-tmpfiles to look at it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove what programs like this one have left beside its folder when they were stopped while they unpacked themselves."""
    for other in folder.parent.glob("_MEI*"):
        with suppress(OSError):  # another user's, in use, or just removed
            is_ours = (other / "glibc").is_file() and (other / "app").is_dir()
            if is_ours and time.time() - other.stat().st_mtime > _ABANDONED_SECONDS:
                with kept(other, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(other, ignore_errors=True)
