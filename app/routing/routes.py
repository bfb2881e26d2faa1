"""The routes file: TOML with one table for each route, named after the route.

    [detector]
    to = "yolo11n:2"
    canary = {to = "yolo11n:3", share = 0.05}
    fallback = "yolo11n:1"

Each worker reads it again when it changes. While it is invalid, its last valid content stays in use.
"""

import fcntl
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from app.host import toml
from app.model.reference import split_reference
from app.resilience import last_valid
from app.routing.route import Canary, Route, RouteName

_HEADER = "# Routes of Nereid. `PUT /routes/{name}` writes this file anew, without comments.\n"

_NO_ROUTES = msgspec.msgpack.encode({})


class RoutesError(Exception):
    """The routes file is invalid."""


class Routes:
    """The routes in a file."""

    def __init__(self, path: Path) -> None:
        """Read the routes; errors are those of `load`."""
        self._path = path
        self._file = last_valid.WatchedFile("routes", path, partial(load, path))

    @property
    def known(self) -> Mapping[str, Route]:
        """The routes by name; another mapping when the file has changed."""
        return self._file.tables

    def put(self, name: str, route: Route | None) -> bool:
        """Add or replace a route in the file, or remove it if it is None; return whether it was there.

        Raises ValueError if the route or its name is not valid, RoutesError if the file is not, OSError if it cannot be written.
        """
        with self._writing() as routes:
            is_there = routes.pop(name, None) is not None
            if route is not None:
                routes[name] = route
            return is_there

    def withdraw(self, name: str, canary: Canary, reason: str) -> None:
        """Send no more requests to this canary of a route, unless it has been changed meanwhile. Errors are those of `put`."""
        with self._writing() as routes:
            if (route := routes.get(name)) is not None and route.canary == canary:
                withdrawn = msgspec.structs.replace(canary, withdrawn=reason)
                routes[name] = msgspec.structs.replace(route, canary=withdrawn)

    @contextmanager
    def _writing(self) -> Iterator[dict[str, Route]]:
        """Lock out other writers, yield the routes in the file, and replace the file."""
        path = self._path.resolve()  # of a symbolic link, its target is replaced
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield (routes := _read(self._path))
            _replace(path, _HEADER + "\n" + toml.dump(msgspec.to_builtins(routes)).lstrip())
            os.fsync(folder)
        finally:
            os.close(folder)
        self._file.next_check = 0.0


def load(path: str | Path) -> dict[str, Route]:
    """Read a routes file, or recall the last valid content on this host; raise RoutesError if there is none.

    A file that is missing or empty has no routes, unless it has had some: then an editor or a full disk may have truncated it.
    """
    return last_valid.load("routes", str(path), partial(_read, Path(path)), dict[str, Route], RoutesError)


def _read(path: Path) -> dict[str, Route]:
    try:
        text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        routes = _parse(text)
    except OSError as error:
        raise RoutesError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # includes TOMLDecodeError and UnicodeDecodeError
        raise RoutesError(f"{path} is not valid: {error}") from error
    if not text and last_valid.recall(str(path)) not in {None, _NO_ROUTES}:
        raise RoutesError(f"{path} does not exist, or is empty")
    return routes


def _parse(text: str) -> dict[str, Route]:
    """Return the routes in the text of a file; raise ValueError if it is not valid."""
    try:
        routes = msgspec.convert(tomllib.loads(text), dict[RouteName, Route])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    for name, route in routes.items():
        for field, reference in route.references:
            if split_reference(reference)[0] in routes:
                raise ValueError(f"[{name}] {field}: {reference} is a route, not a model")
    return routes


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
