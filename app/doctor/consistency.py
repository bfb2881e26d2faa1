"""Checks of settings that are individually valid, but inconsistent with each other or with the files they name."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from app import feature
from app.api.caller import keys
from app.api.caller.keys import KeysError
from app.cascade import catalog
from app.cascade.catalog import CascadesError
from app.doctor.finding import Finding, failure, ok, warning
from app.host import extras, ports
from app.routing import routes
from app.routing.routes import RoutesError
from app.settings.schema import PREFIX, Settings
from app.triton import control_key, credentials
from app.triton.credentials import CredentialsError

KEY_FIX = (
    f"put the KEY of Triton's option --grpc-restricted-protocol=...:{control_key.HEADER}=KEY into a file, "
    f"and set {PREFIX}TRITON_CONTROL_KEY_FILE to it"
)
"""The fix if Triton requires a key."""
# Default grace periods of `docker stop` and Kubernetes.
_USUAL_STOP_SECONDS = "10 s with Docker, 30 s with Kubernetes"


def check(settings: Settings) -> Iterator[Finding]:
    """Check the settings, which are individually valid."""
    yield from _check_listener(settings)
    yield from check_files(settings)
    yield from check_search_folders(settings)
    yield from _check_timeouts(settings)


def _check_listener(settings: Settings) -> Iterator[Finding]:
    if settings.api_keys_file:
        with suppress(KeysError):  # reported by the check of the files
            known = keys.load(Path(settings.api_keys_file))
            yield ok("api_keys", f"API keys in {settings.api_keys_file}: {', '.join(known)}")
        return
    if settings.socket or settings.instances:
        yield ok("api_keys", "no API key is needed, and the API listens on unix sockets only")
        return
    try:
        is_loopback = ports.is_loopback(settings.host)
    except (OSError, UnicodeError):  # reported by the check of the gateway's port
        return
    text = f"no API key is needed at {settings.address}"
    if is_loopback:
        yield ok("api_keys", f"{text}, which only this machine can reach")
    else:
        fix = f"nereid key NAME, put its table into a file, and set {PREFIX}API_KEYS_FILE to it; or {PREFIX}HOST=127.0.0.1"
        yield warning("api_keys", f"{text}, which other machines can reach", fix)


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check the files and packages without which the API does not start."""
    lacking = {finding.code: finding for finding in _check_extras(settings)}
    yield from lacking.values()
    files: list[feature.File] = [
        ("api_keys", "api_keys_file", lambda path: keys.load(Path(path)), "`nereid key NAME` makes a table for this file"),
        ("routes", "routes_file", routes.load, 'it has one table for each route, such as [detector] with to = "yolo11n"'),
        ("cascades", "model_repository", lambda path: catalog.load(Path(path, catalog.FILE)), "`nereid add` writes this file"),
        ("tls_files", "triton_tls_folder", credentials.load, "it needs ca.crt, and perhaps tls.crt and tls.key"),
        ("control_key", "triton_control_key_file", _read_control_key, KEY_FIX),
        *chain.from_iterable(each.files for _, each in feature.used(settings)),
    ]
    for code, setting, read, fix in files:
        path = getattr(settings, setting)
        try:
            _ = path and code not in lacking and read(path)
        except (KeysError, RoutesError, CascadesError, CredentialsError, ValueError) as error:
            yield failure(code, f"{PREFIX}{setting.upper()}: {error}", fix)


def check_search_folders(settings: Settings) -> Iterator[Finding]:
    """Check the folders of the images that may be indexed. It may take for ever, if their disk is dead."""
    for folder in settings.search_folder_paths:
        if not os.access(folder, os.R_OK | os.X_OK) or not folder.is_dir():
            text = f"{PREFIX}SEARCH_FOLDERS: {folder} is not a folder that this user can read"
            yield failure("search_folders", text, "make it readable, or leave it out")


def _check_extras(settings: Settings) -> Iterator[Finding]:
    for extra, setting, modules in (
        *((*each.needs(settings), each.extras) for _, each in feature.used(settings)),
        ("search" if settings.search != "off" else "", "search", extras.MODULES),
        ("otel" if settings.tracing else "", "tracing", extras.MODULES),
    ):
        if extra and (lacking := extras.lack(extra, PREFIX + setting.upper(), modules)):
            yield failure(setting, lacking, extras.command(extra))


def _read_control_key(path: str) -> None:
    if not control_key.metadata(Path(path)):
        raise ValueError(f"{path} has no key that can be read")


def _check_timeouts(settings: Settings) -> Iterator[Finding]:
    default, maximum = settings.timeout_seconds, settings.max_timeout_seconds
    if default > maximum:
        text = f"the default deadline of {default:g} s is longer than the {maximum:g} s that a request may set"
        yield warning("timeouts", text, f"{PREFIX}MAX_TIMEOUT_SECONDS={default:g}")
    else:
        stop = settings.drain_delay_seconds + settings.drain_seconds
        text = f"requests end within {maximum:g} s; give a stop {stop:.0f} s before it becomes a kill ({_USUAL_STOP_SECONDS})"
        yield ok("timeouts", text)
