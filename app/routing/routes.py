"""The routes file: TOML with one table for each route, named after the route.

    [detector]
    to = "yolo11n:2"
    canary = {to = "yolo11n:3", share = 0.05}
    fallback = "yolo11n:1"

Each worker reads it again when it changes. While it is invalid, its last valid content stays in use.
"""

import fcntl
import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import structlog

from app.model.reference import split_reference
from app.resilience import last_valid
from app.routing.route import Route, RouteName

_CHECK_SECONDS = 1.0
_HEADER = "# Routes of Nereid. `PUT /routes/{name}` writes this file anew, without comments.\n"

LOG = structlog.get_logger()


class RoutesError(Exception):
    """The routes file, or a change of it, is invalid."""


class Routes:
    """The routes in a file."""

    def __init__(self, path: Path) -> None:
        """Read the routes; raise RoutesError if the file is not valid, and has not been while this host has run."""
        self._path = path
        self._version: tuple[int, ...] | None = ()
        self._next_check = 0.0
        self._known: dict[str, Route] = {}
        self._read_if_changed()

    @property
    def known(self) -> Mapping[str, Route]:
        """The routes by name; another mapping when the file has changed."""
        if (now := monotonic()) >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._read_if_changed()
        return self._known

    def put(self, name: str, route: Route) -> None:
        """Add or replace a route in the file.

        Raises:
            RoutesError: The file would not be valid, or is not.
            OSError: It cannot be written.
        """
        with self._writing() as routes:
            routes[name] = route

    def delete(self, name: str) -> bool:
        """Remove a route from the file; return whether it was there. Errors are those of `put`."""
        with self._writing() as routes:
            return routes.pop(name, None) is not None

    def withdraw(self, name: str, reason: str) -> None:
        """Send no more requests to the canary of a route, if it has one. Errors are those of `put`."""
        with self._writing() as routes:
            if (route := routes.get(name)) is not None and route.canary is not None:
                canary = msgspec.structs.replace(route.canary, withdrawn=reason)
                routes[name] = msgspec.structs.replace(route, canary=canary)

    @contextmanager
    def _writing(self) -> Iterator[dict[str, Route]]:
        """Lock out other writers, yield the routes in the file, and replace the file if the block changes them."""
        path = self._path.resolve()  # of a symbolic link, its target is replaced
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            routes = _read(path) if self.known or _has_content(path) else {}
            before = dict(routes)
            yield routes
            if routes != before:
                _replace(path, _to_toml(routes))
                os.fsync(folder)
        finally:
            os.close(folder)
        self._next_check = 0.0

    def _read_if_changed(self) -> None:
        version = last_valid.version_of(self._path)
        if version == self._version and "routes" not in last_valid.refused:  # a file that could not be read may be the same
            return
        self._version = version
        if (known := load(self._path)) != self._known:
            self._known = known
            LOG.info("the routes were read", routes=sorted(known))


def load(path: Path) -> dict[str, Route]:
    """Read a routes file, or recall the last valid content on this host; return the routes by name.

    A file that is missing or empty has no routes, unless it has had some: then an editor or a full disk may have truncated it.

    Raises:
        RoutesError: The file is not valid, and has not been.
    """
    try:
        return last_valid.load("routes", str(path), partial(_read, path), dict[str, Route], RoutesError)
    except RoutesError:
        if _has_content(path):
            raise
        return last_valid.load("routes", str(path), dict, dict[str, Route])


def model_of(path: Path, name: str) -> str:
    """Return the name of the model for which a name stands according to a routes file; other names stand for themselves.

    Raises:
        RoutesError: As for `load`.
    """
    route = load(path).get(name)
    return name if route is None else split_reference(route.to)[0]


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _read(path: Path) -> dict[str, Route]:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RoutesError(f"{path}: {error.strerror}") from error
    except (ValueError, RoutesError) as error:  # TOMLDecodeError, UnicodeDecodeError
        raise RoutesError(f"{path} is not valid: {error}") from error


def _parse(text: str) -> dict[str, Route]:
    if not text:
        raise RoutesError("it is empty")
    try:
        routes = msgspec.convert(tomllib.loads(text), dict[RouteName, Route])
    except msgspec.ValidationError as error:
        raise RoutesError(str(error)) from None
    for name, route in routes.items():
        for field, reference in route.references:
            if split_reference(reference)[0] in routes:
                raise RoutesError(f"[{name}] {field}: {reference} is a route, not a model")
    return routes


def _to_toml(routes: Mapping[str, Route]) -> str:
    return _HEADER + "".join(f"\n[{json.dumps(name)}]\n{_to_lines(route)}" for name, route in routes.items())


def _to_lines(route: Route) -> str:
    return "".join(f"{name} = {_to_value(value)}\n" for name, value in msgspec.to_builtins(route).items())


def _to_value(value: Any) -> str:  # noqa: ANN401 - of any TOML type
    """Return a value in TOML; JSON's numbers and strings are also TOML's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_to_value(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    """Replace the file by one with this text, at once; the caller holds the lock."""
    _parse(text)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, unfinished)
    unfinished.replace(path)
