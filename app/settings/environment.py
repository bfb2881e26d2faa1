"""Read the settings from the environment."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from app.expected import expected_value, quoted, suggestion
from app.settings.schema import PREFIX, Settings, SettingsError

RENAMED = {"TRITON_URLS": "TRITON_ENDPOINTS", "MAX_MEGAPIXELS_UNSCALABLE": "MAX_MEGAPIXELS_NON_JPEG"}
"""Old names of variables, without the prefix, that are still read until the next version."""
REMOVED = {
    "AGGREGATE": "to send each image in its own call, set NEREID_CALLS_IN_FLIGHT=4096",
    "BODY_PAUSE_SECONDS": "a body may pause for 10 s; NEREID_BODY_SECONDS limits the whole body",
    "CONNECTIONS": "a worker has one connection to each Triton, because more were not faster",
    "DEEPSTACK_MAX_OBJECTS": "clients set the parameter `max_objects`, such as `?max_objects=20` in Frigate's `api_url`",
    "LOG_FORMAT": "the log is text on a terminal and lines of JSON elsewhere, such as in a pipe",
    "SOCKET_FOLDER": "with NEREID_INSTANCES, NEREID_SOCKET is the folder of the sockets",
    "TRITON_CA_FILE": "it is the file `ca.crt` in NEREID_TRITON_TLS_FOLDER",
    "TRITON_CERT_FILE": "it is the file `tls.crt` in NEREID_TRITON_TLS_FOLDER",
    "TRITON_GRPC_PORT": "the embedded Triton listens on a unix socket, which the API finds by NEREID_TRITON_HOME",
    "TRITON_HTTP_PORT": "the embedded Triton has TCP ports only with NEREID_TRITON_PORTS",
    "TRITON_KEY_FILE": "it is the file `tls.key` in NEREID_TRITON_TLS_FOLDER",
    "TRITON_METRICS_PORT": "the embedded Triton has TCP ports only with NEREID_TRITON_PORTS; `/metrics` has its statistics",
    "TRITON_TLS": "set NEREID_TRITON_TLS_FOLDER to a folder with `ca.crt`, the certificates of the CAs",
}
"""What to do instead of setting a variable that was removed, by its name without the prefix."""
_UNITS = {"_seconds": "seconds", "_ms": "milliseconds", "_mb": "MiB", "megapixels": "megapixels"}
"""Units by the part of a setting's name that tells them."""
_INTERNAL = "INTERNAL_"
"""Begins the names of variables, without the prefix, that the processes of Nereid pass on to each other."""
_OF_CLIENTS = "KEY"
"""A variable, without the prefix, that clients read, and that may be exported in the shell that starts a gateway, too."""


def load(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings. An empty variable counts as unset.

    Raises:
        SettingsError: A variable with the prefix is unknown or was removed, or its value has the wrong type or is out of range.
    """
    given = {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX)}
    given = {name: value for name, value in given.items() if not name.startswith(_INTERNAL) and name != _OF_CLIENTS}
    if removed := sorted(given.keys() & REMOVED.keys()):
        raise SettingsError("; ".join(f"{PREFIX}{name} was removed: {REMOVED[name]}" for name in removed))
    known = {name.upper() for name in Settings.__struct_fields__}
    if unknown := sorted(given.keys() - known - RENAMED.keys()):
        similar = suggestion(unknown[0], sorted(known), prefix=PREFIX)
        raise SettingsError(f"{PREFIX}{unknown[0]} is not a setting{similar or ';'} `nereid settings` lists them all")
    given = {name: value for name, value in given.items() if value}
    for old, new in RENAMED.items():
        if old in given:
            given.setdefault(new, given.pop(old))
    is_here = os.path.isdir(Settings().model_repository)  # noqa: PTH112 - Path's fails in a folder that this user may not enter
    folders = {} if is_here else data_folders(environ)
    values = folders | {name.lower(): value for name, value in given.items()}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition(" - at `$.")[2].rstrip("`")
        expected = expected_value(Settings, name, _unit(name))
        raise SettingsError(f"{PREFIX}{name.upper()}: Expected {expected}{quoted(values[name])}") from error


def data_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders in the user's data directory, by setting."""
    defaults = Settings()
    data = environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111 - Path's fails without a home
    folders = "model_repository", "triton_home", "database_home"
    return {name: str(Path(data, "nereid", getattr(defaults, name))) for name in folders}


def _unit(name: str) -> str:
    """Return the unit of a setting according to its name; none for a number without one."""
    return next((unit for part, unit in _UNITS.items() if part in name), "")
