"""Folders that are installed in full or not at all, by one process at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from app.host.program import CommandError
from app.telemetry.logging import say

_LOCK = "install.lock"


def is_complete(folder: Path, tag: str) -> bool:
    """Return whether `building` has made a folder with this tag."""
    try:
        return (folder / "complete").read_text(encoding="utf-8") == tag
    except OSError:  # it does not exist, or another process is replacing it
        return False


@contextmanager
def lock(home: Path) -> Iterator[None]:
    """Allow only one process at a time to install in `home`; raise CommandError if `home` cannot be written."""
    with ExitStack() as stack:
        try:
            home.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)  # the file stays: another process may be waiting for it
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is installing in {home}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise CommandError(f"{home / _LOCK} could not be written or locked: {error.strerror}") from error
        yield


@contextmanager
def building(target: Path, tag: str) -> Iterator[Path]:
    """Create a folder atomically, and note the tag in it; raise CommandError if it cannot be written."""
    for leftover in target.parent.glob(f"{target.name}*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Unique per process: the pip of a killed process may still be writing into its folder.
    folder = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        folder.mkdir()
        yield folder
        (folder / "complete").write_text(tag, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    except OSError as error:
        raise CommandError(f"{target} could not be written: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
