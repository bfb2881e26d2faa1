"""The temporary folder to which the one-file program is unpacked."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Longer than unpacking, during which a folder is not locked yet.
_ABANDONED_SECONDS = 600


@contextmanager
def kept(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Lock a folder, so that it is not removed while it is used; systemd-tmpfiles also skips locked folders.

    Raises:
        BlockingIOError: With LOCK_NB, the folder is in use. Without it, this waits until systemd-tmpfiles has checked the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove folders next to this one that were left by programs stopped while unpacking."""
    for other in folder.parent.glob("_MEI*"):
        with suppress(OSError):  # it belongs to another user, is in use, or was just removed
            is_ours = (other / "glibc").is_file() and (other / "app").is_dir()
            if is_ours and time.time() - other.stat().st_mtime > _ABANDONED_SECONDS:
                with kept(other, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(other, ignore_errors=True)
