"""Where the routes of dialects are: each below its dialect's name, and at the path that the other service has for it.

Where several have one path, the request tells whose it is, as the `callers` of a dialect say.
"""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import msgspec
from litestar import Router
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send
from litestar.utils import normalize_path

from app.api import problems
from app.api.content_type import JSON
from app.api.dialects.dialect import Dialect
from app.api.problems import WrittenError
from app.api.schema import Problem

_PARAMETER = re.compile(r"\{\w+:(str|int)\}")
_PATTERNS = {"str": "[^/]+", "int": "[0-9]+"}


class _Claim(NamedTuple):
    """A path that a dialect has."""

    pattern: re.Pattern[str]
    dialect: Dialect
    path: str

    def applies(self, scope: HTTPScope) -> bool:
        """Return whether a request at this path is for the dialect."""
        is_caller = self.dialect.callers.get(self.path)
        return is_caller is None or is_caller(scope)


def load(names: Sequence[str]) -> list[Dialect]:
    """Return the dialects of these names."""
    return [import_module(f"app.api.dialects.{name.replace('-', '_')}").DIALECT for name in names]


def to_router(dialect: Dialect) -> Router:
    """Make the routes of a dialect, below its name. The OpenAPI document leaves out what other services describe."""
    return Router(f"/{dialect.name}", route_handlers=dialect.handlers, include_in_schema=False)


def error_writer(dialects: Sequence[Dialect]) -> Callable[[Problem, Scope], WrittenError]:
    """Return what writes an error as the dialect does whose request it is; any other as the gateway does."""
    by_name = {dialect.name: dialect for dialect in dialects}

    def write(problem: Problem, scope: Scope) -> WrittenError:
        dialect = by_name.get(scope["path"].removeprefix("/").partition("/")[0])
        if dialect is None:
            return problems.write(problem)
        problem = msgspec.structs.replace(problem, status=dialect.statuses.get(problem.status, problem.status))
        return WrittenError(problem.status, JSON, msgspec.json.encode(dialect.write_error(problem)))

    return write


class DialectMiddleware:
    """Passes a request at the path of another service on to the route of the dialect."""

    def __init__(self, app: ASGIApp, dialects: Sequence[Dialect]) -> None:
        self.app = app
        self._claims: dict[str, list[_Claim]] = {}
        """By path, as far as it has no parameters."""
        self._other_claims: list[_Claim] = []
        for dialect in dialects:
            for path in (path for handler in dialect.handlers for path in sorted(handler.paths)):
                claim = _Claim(_to_pattern(path), dialect, path)
                (self._other_claims if "{" in path else self._claims.setdefault(path, [])).append(claim)
        # For the gateway's own requests, to which none applies.
        self._any_other = re.compile("|".join(claim.pattern.pattern for claim in self._other_claims) or "(?!)")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; change nothing but its path."""
        if scope["type"] == ScopeType.HTTP and (dialect := self._find(scope)) is not None:
            scope["path"] = f"/{dialect.name}{scope['path']}"
        await self.app(scope, receive, send)

    def _find(self, scope: HTTPScope) -> Dialect | None:
        path = scope["path"]
        if path.endswith("/") or "//" in path:
            path = normalize_path(path)  # as Litestar does
        claims = self._claims.get(path)
        if claims is None:
            if not self._any_other.fullmatch(path):
                return None
            claims = [claim for claim in self._other_claims if claim.pattern.fullmatch(path)]
        return next((claim.dialect for claim in claims if claim.applies(scope)), None)


def _to_pattern(path: str) -> re.Pattern[str]:
    """Return what matches the paths of a route: its own, with any values of its parameters."""
    parts = _PARAMETER.split(path)
    return re.compile("".join(_PATTERNS[part] if number % 2 else re.escape(part) for number, part in enumerate(parts)))
