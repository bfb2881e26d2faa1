"""The cascades that a gateway knows: those of the program, and those in `cascades.toml` in the model repository."""

import asyncio
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from app.cascade.definition import Cascade, Step
from app.host.program import CommandError
from app.model.reference import NAME
from app.resilience import last_valid

FILE = "cascades.toml"
"""Name of the file in the model repository."""
_CHECK_SECONDS = 1.0
_MAX_BYTES = 1 << 20


class CascadesError(CommandError):
    """A file of cascades is invalid; the message says why."""


def load(path: Path) -> dict[str, Cascade]:
    """Read a file as `read`, or recall its last valid content on this host."""
    return last_valid.load("cascades", str(path), partial(read, path), dict[str, Cascade], CascadesError)


def read(path: Path) -> dict[str, Cascade]:
    """Read cascades by name from a file, none if it does not exist; raises CascadesError."""
    try:
        tables = _read(path) if path.exists() else {}
    except PermissionError:  # of the folder: a repository that is another user's
        tables = {}
    except OSError as error:  # such as of a disk of the network
        raise CascadesError(f"{path}: {error.strerror}") from error
    if unfit := next((name for name in tables if not NAME.fullmatch(name)), None):
        raise CascadesError(
            f"{path}: {unfit[:80]!r} is not a name: letters, digits, and `_`, `-` and `.` after the first, at most 64"
        )
    return {name: _convert(table, path, name) for name, table in tables.items()}


def read_one(path: Path) -> Cascade:
    """Read a file with one cascade, whose tables are `[steps.NAME]`; raise CascadesError if it is missing or invalid."""
    return _convert(_read(path), path)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # which may have no end, as a device
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise CascadesError(f"{path}: longer than {_MAX_BYTES >> 20} MiB")
        return tomllib.loads(content.decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also of integers with thousands of digits
        raise CascadesError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _convert(table: Any, path: Path, *name: str) -> Cascade:  # noqa: ANN401 - anything that TOML can express
    """Convert the table of a cascade, which has this name in the file, or is the whole file; an error names the step."""
    steps, where = table.get("steps") if isinstance(table, dict) else None, name
    try:
        for step, content in steps.items() if isinstance(steps, dict) else ():
            where = (*name, "steps", step)
            msgspec.convert(content, Step)
        where = name
        return msgspec.structs.replace(msgspec.convert(table, Cascade), name="".join(name))
    except msgspec.ValidationError as error:
        named = f"[{'.'.join(where)}] " if where else ""
        raise CascadesError(f"{path}: {named}{error}") from None


BUILT_IN: Mapping[str, Cascade] = read(Path(__file__).with_name("built_in.toml"))


class Catalog:
    """Cascades by name; the file is read again when it changes, and its last valid content stays in use."""

    def __init__(self, path: Path) -> None:
        self._file: last_valid.WatchedFile[Cascade] = last_valid.WatchedFile("cascades", path, partial(load, path))
        self._tables = self._file.tables

    async def follow(self) -> None:
        """Read the file again whenever it has changed: in a thread, because the disk may be that of a network."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self._tables = await asyncio.to_thread(lambda: self._file.tables)

    def own(self, name: str) -> Cascade | None:
        """Return the cascade that `/predict/{name}` runs: one of the file that replaces none of the program, which has routes."""
        return None if name in BUILT_IN else self._tables.get(name)

    def get(self, name: str) -> Cascade | None:
        """Return the cascade of this name; None if there is none."""
        return self._tables.get(name) or BUILT_IN.get(name)

    def names(self) -> list[str]:
        """Return the names of all cascades."""
        return sorted({*BUILT_IN, *self._tables})
