"""A zip that may be hostile: of its files, one is copied, and those that this one needs."""

import shutil
import stat
import zipfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path, PurePosixPath

from app.host.program import CommandError

_MAX_FILES = 10_000
_MARK = b"PK\x03\x04"
# Of macOS, with attributes of the others under their names.
_ATTRIBUTES = "__MACOSX/"


def is_zip(file: Path) -> bool:
    """Return whether a file begins as a zip that is not empty."""
    with file.open("rb") as content:
        return content.read(len(_MARK)) == _MARK


def unpack(file: Path, folder: Path, suffix: str, find_needed: Callable[[Path], Iterable[str]], max_bytes: int) -> Path:
    """Copy the one file with this suffix in a zip into a new folder, and what it needs from its folder there; return its path.

    `find_needed` returns the names of what a copied file needs. What the zip lacks of that is left out. All have at most
    `max_bytes` together. Raises CommandError if the zip does not fit, and what `zipfile` does if it is broken.
    """
    folder.mkdir()
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not member.filename.startswith(_ATTRIBUTES)]
        chosen = [member for member in members if member.filename.endswith(suffix)]
        if len(chosen) != 1:
            raise CommandError(f"the zip contains {len(chosen)} files *{suffix}, not one")
        left = _copy(archive, chosen[0], target := folder / f"whole{suffix}", max_bytes)
        beside = {member.filename: member for member in members}
        place = PurePosixPath(chosen[0].filename).parent
        for name in islice(find_needed(target), _MAX_FILES):
            if PurePosixPath(name).name == name != ".." and (member := beside.get(str(place / name))):
                left = _copy(archive, member, folder / name, left)
    return target


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, max_bytes: int) -> int:
    # Returns how many more bytes there may be. A member is never read beyond the size that it declares.
    if stat.S_IFMT(member.external_attr >> 16) not in {0, stat.S_IFREG}:
        raise CommandError(f"{member.filename!r} in the zip is not a plain file")
    if member.file_size > max_bytes:
        raise CommandError("what is needed of the zip is too large when it is unpacked")
    with archive.open(member) as source, target.open("xb") as copy:
        shutil.copyfileobj(source, copy)
    return max_bytes - member.file_size
