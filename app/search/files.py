"""Files in the folders that may be indexed, in threads of their own: a disk that does not answer holds up nothing else."""

import asyncio
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from errno import EIO, ENOTCONN, ESTALE, ETIMEDOUT
from fnmatch import translate
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TypeAlias, TypeVar

from app.errors import InvalidParameter, NotOffered, SearchUnavailable
from app.expected import is_plain

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".avif", ".heic", ".heif", ".tif", ".tiff"))
_MAX_FILES = 1_000_000
_THREADS, _PATIENCE_SECONDS, _ATTEMPTS = 32, 5.0, 3
"""Threads for each of the folders, of which some may hang; how long, and how often, one file is waited for."""
_LISTING_SECONDS = 120.0
"""How long the names in one folder are waited for."""
_DEAD = "The disk of a folder of NEREID_SEARCH_FOLDERS does not answer"
_MACHINE_IDS = "/etc/machine-id", "/proc/sys/kernel/random/boot_id"
T = TypeVar("T")


Listing: TypeAlias = tuple[Sequence[str], Counter[str], int, Sequence[str]]
"""Paths of images, sorted; suffixes of other files; images and folders left out because of their names; unreadable folders."""


class Files:
    """The folders that may be indexed; `excluded` are patterns of names of files, or of folders, if they end with a slash."""

    def __init__(self, folders: Sequence[Path], excluded: Sequence[str], max_bytes: int) -> None:
        self.folders, self._max_bytes = folders, max_bytes
        named = [each.removesuffix("/") for each in excluded]
        self._of_folders, self._of_files = map(_pattern, (named, [each for each in excluded if not each.endswith("/")]))
        # A dead disk takes the threads of its own folder only, and those that list it none of those that read.
        self._places = defaultdict[tuple[Path | None, float], asyncio.Semaphore](partial(asyncio.Semaphore, _THREADS))

    async def allowed(self, directory: str) -> Path:
        """Return a folder in `folders`, or below one of them, without symbolic links; else raise an error."""
        return await self._in_thread(partial(self._allowed, directory), directory)

    async def identify(self, folders: Sequence[str]) -> dict[str, int]:
        """Return a number of this machine for each of these folders or files, 0 for one that is not here, or not in the folders."""
        numbers = await asyncio.gather(*(self._in_thread(partial(self._identify, folder), folder) for folder in folders))
        return dict(zip(folders, numbers, strict=True))

    async def has_moved(self, path: str | None, content: bytes) -> bool:
        """Return whether a file in the folders is not at its path any more, because there is none, or one of other content."""
        with suppress(SearchUnavailable, OSError):
            if path is not None and (root := self._root(path)) is not None:  # read once: a caller waits
                # A folder without its disk is empty.
                return await self._in_thread(lambda: next(root.iterdir(), None) is not None and self._read(path) != content, path)
        return False

    async def list(self, directory: Path, *, recursive: bool) -> Listing:
        """List the images below a folder. Links to folders are not followed. Raises SearchUnavailable if its disk hangs."""
        walk = self._list(directory, recursive=recursive)
        while (listing := await self._in_thread(walk.__next__, str(directory), _LISTING_SECONDS)) is None:
            pass
        return listing

    async def read(self, path: str) -> bytes | None:
        """Return the content of a file in the folders; None if there is none, or it is empty or too large.

        Raises OSError for a file that may be there, but cannot be read, or in time only others in its folder.
        """
        for _ in range(_ATTEMPTS):
            with suppress(SearchUnavailable):
                return await self._in_thread(partial(self._read, path), path)
        await self.identify([str(Path(path).parent)])
        raise TimeoutError(path)

    async def _in_thread(self, work: Callable[[], T], path: str, seconds: float = 0) -> T:
        loop, done, places = asyncio.get_running_loop(), Future[T](), self._places[self._root(path), seconds]

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised there
                done.set_exception(error)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(places.release)

        try:
            async with asyncio.timeout(seconds or _PATIENCE_SECONDS):
                await places.acquire()
                Thread(target=run, name="files", daemon=True).start()
                return await asyncio.shield(asyncio.wrap_future(done))
        except TimeoutError:
            raise SearchUnavailable(_DEAD) from None

    def _allowed(self, directory: str) -> Path:
        if not self.folders:
            raise NotOffered("no folder may be indexed; NEREID_SEARCH_FOLDERS names those that may")
        with suppress(OSError, ValueError, RuntimeError):  # a zero byte; a loop of links
            path = Path(directory).resolve(strict=True)
            if path.is_dir() and any(path.is_relative_to(folder) for folder in self.folders):
                return path
        raise InvalidParameter("directory: expected a folder in NEREID_SEARCH_FOLDERS, or below one of these")

    def _root(self, path: str) -> Path | None:
        return max(filter(Path(path).is_relative_to, self.folders), key=lambda folder: len(folder.parts), default=None)

    def _identify(self, folder: str) -> int:
        machine = 0
        for file in _MACHINE_IDS:  # containers may have no id but that of the boot
            with suppress(OSError, ValueError):
                machine = machine or int(Path(file).read_text().replace("-", ""), 16)
        with suppress(OSError):
            return machine ^ os.stat(folder).st_ino if self._root(folder) else 0  # noqa: PTH116 - a text
        return 0

    def _list(self, directory: Path, *, recursive: bool) -> Iterator[Listing | None]:
        # None again and again, so that whoever waits sees that the disk answers.
        paths, unreadable, others, excluded = list[str](), list[str](), Counter[str](), 0
        paused_at = monotonic()

        def refuse(error: OSError) -> None:
            if error.errno in {EIO, ESTALE, ENOTCONN, ETIMEDOUT}:
                raise SearchUnavailable(_DEAD) from None
            unreadable.append(str(error.filename).encode(errors="backslashreplace").decode())

        for folder, folders, names in os.walk(directory, onerror=refuse):
            kept = [name for name in folders if not self._of_folders(name)]
            excluded += len(folders) - len(kept)
            folders[:] = kept if recursive else []
            for name in names:
                suffix = Path(name).suffix.lower()
                if suffix not in SUFFIXES or not is_plain(path := os.path.join(folder, name)):  # noqa: PTH118 - of a million paths
                    others[suffix[:16] if suffix.isprintable() else ""] += 1
                elif self._of_files(name):
                    excluded += 1
                else:
                    paths.append(path)
            if len(paths) > _MAX_FILES:
                raise InvalidParameter(f"the folder has more than {_MAX_FILES} images; index those in it one by one")
            if monotonic() - paused_at >= 1:
                yield None
                paused_at = monotonic()
        yield sorted(paths), others, excluded, unreadable

    def _read(self, path: str) -> bytes | None:
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - opening a device may do something
                with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - as above
                    opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # noqa: PTH115 - whatever a link has led to
                    if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and any(map(opened.is_relative_to, self.folders)):
                        content = file.read(self._max_bytes + 1)
                        return content if 0 < len(content) <= self._max_bytes else None
        return None


def _pattern(names: Sequence[str]) -> Callable[[str], object]:
    return re.compile("|".join(map(translate, names)) or r"(?!)").match
