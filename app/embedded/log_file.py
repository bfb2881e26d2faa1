"""The log of a program that writes to it by itself."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from app.telemetry.logging import say

_MAX_BYTES = 10 * 2**20


class LogFile:
    """A log of limited size, and the one before it, `.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._previous = path.with_suffix(f"{path.suffix}.1")

    def open(self) -> IO[bytes]:
        """Begin a log, and keep the last one, which may tell why its program ended; without room for one, there is none."""
        try:
            if self.path.exists():
                self.path.replace(self._previous)
            return self.path.open("ab")  # after it was shortened, the program goes on at its new end
        except OSError as error:
            say(f"warning: {self.path} cannot be written: {error.strerror}")
            return Path(os.devnull).open("wb")

    def shorten(self) -> None:
        """Move a log that has become long to `.1`. What is written meanwhile is lost; on a full disk, all of it."""
        with suppress(OSError):  # there is no log, or no room for it
            if self.path.stat().st_size > _MAX_BYTES:
                with suppress(OSError):
                    shutil.copyfile(self.path, self._previous)
                os.truncate(self.path, 0)
