"""The files that every worker reads: their content, or the last valid one, which workers that start meanwhile use as well.

The contents are in a memory file that the first parent process creates and all workers inherit, because they include secrets.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
import structlog

from app.resilience import memory_file

T = TypeVar("T")
File = Literal["api_keys", "triton_tls", "routes", "cache_key", "cascades"]
FILES: tuple[File, ...] = get_args(File)
_VARIABLE = "NEREID_INTERNAL_LAST_VALID_FD"
_CHECK_SECONDS = 1.0

LOG = structlog.get_logger()

refused: dict[File, str] = {}
"""What is wrong with the files of which this process uses an earlier content."""


def create() -> int:
    """Create the memory file, as `memory_file.share` does."""
    return memory_file.share(_VARIABLE, own)


def load(file: File, source: str, read: Callable[[], T], kind: Any, *invalid: type[Exception]) -> T:  # noqa: ANN401 - a type form
    """Read a file, or recall its last valid content if it is invalid now.

    `source` is its path, or several, and `kind` the type of the result, for msgspec. `read` raises one of `invalid`, as this does
    if the file has never been valid.
    """
    try:
        found = read()
    except invalid as error:
        kept = recall(source)
        if kept is None:
            raise
        if refused.get(file) != str(error):
            LOG.error("a file is not valid; its last valid content stays in use", file=file, detail=str(error))  # noqa: TRY400
        refused[file] = str(error)
        return msgspec.msgpack.decode(kept, type=kind)  # type: ignore[no-any-return]
    if refused.pop(file, None):
        LOG.info("a file is valid again", file=file)
    with _contents() as contents:
        contents[source] = msgspec.msgpack.encode(found)
    return found


def recall(source: str) -> bytes | None:
    """Return the last valid content of a file as it is kept; None if it has never been valid."""
    with _contents() as contents:
        return contents.get(source)


class WatchedFile(Generic[T]):
    """The tables of a TOML file, which is read again when it has changed."""

    def __init__(self, file: File, path: Path, read: Callable[[], dict[str, T]]) -> None:
        """Read the file; `read` calls `load`, and its errors are those of this method."""
        self._file, self._path, self._read = file, path, read
        self._version: tuple[int, ...] | None = ()
        self._tables: dict[str, T] = {}
        self.next_check = 0.0
        _ = self.tables

    @property
    def tables(self) -> dict[str, T]:
        """The tables by name, at most a second old; the same object until they change."""
        if (now := monotonic()) >= self.next_check:
            self.next_check = now + _CHECK_SECONDS
            before, self._version = self._version, self._find_version()
            # A file that could not be read may be the same.
            if (self._version != before or self._file in refused) and (tables := self._read()) != self._tables:
                self._tables = tables
                LOG.info("the tables of a file are in use", file=self._file, tables=len(tables))
        return self._tables

    def _find_version(self) -> tuple[int, ...] | None:
        with suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
        return None


@contextmanager
def _contents() -> Iterator[dict[str, bytes]]:
    """Lock the memory file, and write what the block changes."""
    descriptor = int(os.environ.get(_VARIABLE) or own())
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        written = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        contents = msgspec.msgpack.decode(written, type=dict[str, bytes]) if written else {}
        yield contents
        if (changed := msgspec.msgpack.encode(contents)) != written:
            os.truncate(descriptor, 0)  # first, so that it is never a mixture
            os.pwrite(descriptor, changed, 0)
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


@cache
def own() -> int:
    """Return the descriptor of the memory file that this process has created."""
    return os.memfd_create("nereid-last-valid")
