"""Read the settings from the environment."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from app.expected import expected_value, quoted, suggestion
from app.settings.schema import PREFIX, Settings, SettingsError

_UNITS = {"_seconds": "seconds", "_ms": "milliseconds", "_mb": "MiB", "megapixels": "megapixels"}
"""Units by the part of a setting's name that tells them."""
_INTERNAL = "INTERNAL_"
"""Begins the names of variables, without the prefix, that the processes of Nereid pass on to each other."""
_OF_CLIENTS = "KEY"
"""A variable, without the prefix, that clients read, and that may be exported in the shell that starts a gateway, too."""
_OF_SERVICES = re.compile(
    r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*|PORT=(tcp|udp|sctp)://.*)"
)
"""Variables, without the prefix, that Kubernetes sets in a pod for each service there, such as one with the name `nereid`."""


def load(kind: type[Settings], environ: Mapping[str, str]) -> Settings:
    """Read settings of a kind; an empty variable counts as unset. Raises SettingsError for an unknown variable or a wrong value."""
    given = {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not name.startswith(_INTERNAL) and name != _OF_CLIENTS}
    given = {name: value for name, value in given.items() if not _OF_SERVICES.fullmatch(f"{name}={value}")}
    known = {name.upper() for name in kind.__struct_fields__}
    if unknown := sorted(given.keys() - known):
        similar = suggestion(unknown[0], sorted(known), prefix=PREFIX)
        raise SettingsError(f"{PREFIX}{unknown[0]} is not a setting{similar or ';'} `nereid settings` lists them all")
    is_here = os.path.isdir(Settings().model_repository)  # noqa: PTH112 - Path's fails in a folder that this user may not enter
    folders = {} if is_here else data_folders(environ)
    values = folders | {name.lower(): value for name, value in given.items() if value}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`")
        unit = next((unit for part, unit in _UNITS.items() if part in name), "")
        expected = expected_value(kind, name, unit)
        raise SettingsError(f"{PREFIX}{name.upper()}: Expected {expected}{quoted(values[name])}") from error


def data_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders in the user's data directory, by setting."""
    defaults = Settings()
    data = environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111 - Path's fails without a home
    folders = "model_repository", "triton_home", "database_home"
    return {name: str(Path(data, "nereid", getattr(defaults, name))) for name in folders}
