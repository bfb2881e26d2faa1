"""Read the settings from the environment."""

import os
import typing
from collections.abc import Mapping
from typing import Literal

import msgspec

from app.settings.schema import PREFIX, Settings, SettingsError

RENAMED = {"TRITON_URLS": "TRITON_ENDPOINTS", "MAX_MEGAPIXELS_UNSCALABLE": "MAX_MEGAPIXELS_NON_JPEG"}
"""Old names of variables, without the prefix, that are still read until the next version."""
_INTERNAL = "INTERNAL_"
"""Begins the names of variables, without the prefix, that the processes of Nereid pass on to each other."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings. An empty variable counts as unset.

    Raises:
        SettingsError: A variable with the prefix is unknown, or its value has the wrong type or is out of range.
    """
    given = {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not name.startswith(_INTERNAL)}
    known = {name.upper() for name in Settings.__struct_fields__}
    if unknown := sorted(given.keys() - known - RENAMED.keys()):
        raise SettingsError(
            f"{PREFIX}{unknown[0]} is not a setting; the README lists them, and the changelog those that were removed"
        )
    given = {name: value for name, value in given.items() if value}
    for old, new in RENAMED.items():
        if old in given:
            given.setdefault(new, given.pop(old))
    values = {name.lower(): value for name, value in given.items()}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        if choices := _choices(name):
            message = f"Expected one of {', '.join(choices)}; got {values[name]!r}"
        raise SettingsError(f"{PREFIX}{name.upper()}: {message}") from error


def _choices(name: str) -> tuple[str, ...]:
    """Return the valid values of a setting; none if they cannot be listed."""
    kind = typing.get_args(typing.get_type_hints(Settings, include_extras=True)[name])[0]
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return ("true", "false") if kind is bool else ()
