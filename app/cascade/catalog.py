"""The cascades that a gateway knows: those of the program, and those in `cascades.toml` in the model repository."""

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from app.cascade.definition import Cascade
from app.resilience import last_valid

FILE = "cascades.toml"
"""Name of the file in the model repository."""


class CascadesError(Exception):
    """The file is invalid; the message says why."""


def load(path: Path) -> dict[str, Cascade]:
    """Read cascades by name from a file; none if it does not exist.

    Raises:
        CascadesError: It is invalid.
    """
    try:
        read = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Cascade])
        return {name: msgspec.structs.replace(cascade, name=name) for name, cascade in read.items()}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CascadesError(f"{path}: {error}") from error


BUILT_IN: Mapping[str, Cascade] = load(Path(__file__).with_name("built_in.toml"))


class Catalog:
    """Cascades by name; the file is read again when it changes, and its last valid content stays in use."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it exists; raises CascadesError if it is invalid."""
        read = partial(last_valid.load, "cascades", str(path), partial(load, path), dict[str, Cascade], CascadesError)
        self._file: last_valid.WatchedFile[Cascade] = last_valid.WatchedFile("cascades", path, read)

    def get(self, name: str) -> Cascade | None:
        """Return the cascade of this name; None if there is none."""
        return self._file.tables.get(name) or BUILT_IN.get(name)

    def names(self) -> list[str]:
        """Return the names of all cascades."""
        return sorted({*BUILT_IN, *self._file.tables})
