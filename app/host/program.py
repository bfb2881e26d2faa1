"""This program: its command line and its files. It may be a one-file program that includes Python."""

import os
import sys
from collections.abc import Collection
from pathlib import Path

import app

_LIBRARIES = "LD_LIBRARY_PATH"
_DESCRIPTORS = "NEREID_INTERNAL_"
"""Begins the names of variables that name open files, which only a child that inherits these may have."""
ROOT = Path(app.__file__).parents[1]
"""The folder that contains the program's packages."""
IS_ONE_FILE = hasattr(sys, "_MEIPASS")
"""Whether this is the one-file program, which is unpacked to a temporary folder while it runs."""


class CommandError(Exception):
    """A command cannot be carried out; the message is one line for the user."""

    exit_code = 1


class Busy(CommandError):
    """A command cannot be carried out now, because another process does the same."""

    exit_code = os.EX_TEMPFAIL


class NotChecked(CommandError):
    """A network is not added, because its check has seen nothing."""

    exit_code = 3


class NoSuchModel(CommandError):
    """A command names a model or a version that does not exist."""

    exit_code = os.EX_NOINPUT


class NotPossible(CommandError):
    """A command cannot be carried out with this installation."""

    exit_code = os.EX_UNAVAILABLE


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this program; use it with `environment`."""
    # With -P, a package `app` in the current folder cannot shadow this one.
    return [sys.executable, *([] if IS_ONE_FILE else ["-P"]), "-m", module, *arguments]


def environment(inherited: Collection[int] = ()) -> dict[str, str]:
    """Return the environment for `command`; `inherited` are the descriptors that the child gets by `pass_fds`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DESCRIPTORS) or value in map(str, inherited)}
    if IS_ONE_FILE:
        original = {f"{_LIBRARIES}_ORIG": kept[_LIBRARIES]} if _LIBRARIES in kept else {}
        return {**kept, **original, _LIBRARIES: str(ROOT)}  # as PyInstaller's bootloader sets them
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))}


def version() -> str:
    """Return the version; for the one-file program, with its requirements."""
    if not IS_ONE_FILE:
        return app.__version__
    glibc = (ROOT / "glibc").read_text(encoding="ascii")
    return f"{app.__version__} (one file with Python {sys.version.split()[0]}; needs glibc {glibc} or later)"
