"""Routes as data: what is known of a request before its body, and whose path it is."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.types import HTTPScope, Scope
from litestar.utils import normalize_path

from app.model.heads import DetectionHead, Task

VERSION = "/v1"
"""Prefix under which the gateway's own routes are found as well."""
UNMATCHED = "unmatched"
"""The route of a path that does not exist. The path itself would be a name of its own for each mistake of a caller."""

_PARAMETER = re.compile(r"\{(\w+):(str|int)\}")


class ModelRoute(HTTPRouteHandler):
    """A route at which a model is asked, and what admission must know of it."""

    def __init__(  # noqa: PLR0913 - what is known of a route
        self,
        path: str,
        *,
        task: Task | None = DetectionHead.task,
        takes: Literal["image", "images", "text"] = "image",
        media_types: frozenset[str] = frozenset(),
        key_in: Literal["header", "query", "body"] = "header",
        model_header: bytes = b"",
        is_get: bool = False,
        **options: Any,  # noqa: ANN401 - those of Litestar
    ) -> None:
        """Describe a route.

        Args:
            path: As Litestar takes it. Its parameters `model` and `version` name the model.
            task: Whose default model is asked if the request names none; None if the body has to name one.
            takes: What the body contains: one image, one or several, or none.
            media_types: Types that the body may have; empty for those of an image or a form.
            key_in: Where the API key may be: in a header; `query`: also in the query; `body`: also in the query and the body.
            model_header: Name of a header that names the model, in lower case.
            is_get: Whether GET is answered as well, which asks no model.
            options: Those of Litestar's routes.
        """
        methods = [HttpMethod.POST, *([HttpMethod.GET] if is_get else [])]
        super().__init__(path, http_method=methods, status_code=200, **options)
        self.task = task
        self.takes = takes
        self.media_types = media_types
        self.key_in = key_in
        self.model_header = model_header

    async def authorize_connection(self, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
        """Run the guards. Litestar would make a copy of the route for each of them, attribute by attribute."""
        for guard in self.resolve_guards():
            await guard(connection, self)  # type: ignore[misc]


class Target(NamedTuple):
    """Where requests at a path go."""

    handler: HTTPRouteHandler
    template: str
    """The path for logs, such as `/predict/{model}`."""
    prefix: str = ""
    """Put in front of the path of a dialect: Litestar has its routes below its name."""
    applies: Callable[[HTTPScope], bool] | None = None
    """Whether a request at this path is meant; if not, another route may be. None: each is."""


class RouteTable:
    """Finds the route of a request before Litestar does, and sends it to the dialect whose path it has."""

    def __init__(self) -> None:
        """Have no routes yet. Of those that have the same path, the first one that applies to a request gets it."""
        self.paths: list[tuple[str, Target]] = []
        """All paths, as clients send them, with Litestar's parameters, and where they go."""
        self._fixed: dict[str, list[Target]] = {}
        self._others: list[tuple[re.Pattern[str], Target]] = []

    def add(
        self,
        handlers: Iterable[HTTPRouteHandler],
        prefix: str = "",
        *,
        is_prefix_sent: bool = True,
        applies: Mapping[str, Callable[[HTTPScope], bool]] | None = None,
    ) -> None:
        """Add routes.

        Args:
            handlers: The routes.
            prefix: In front of their paths, as Litestar has them.
            is_prefix_sent: Whether clients send the prefix; if not, it is put in front of the path.
            applies: By path, whether a request there is meant.
        """
        for handler in handlers:
            for path in sorted(handler.paths):
                template = prefix + _PARAMETER.sub(r"{\1}", path)
                target = Target(handler, template, "" if is_prefix_sent else prefix, (applies or {}).get(path))
                self._add(path if not is_prefix_sent else prefix + path, target)

    def _add(self, path: str, target: Target) -> None:
        self.paths.append((path, target))
        if "{" not in path:
            self._fixed.setdefault(path, []).append(target)
            return
        self._others.append((_to_pattern(path), target))

    def find(self, scope: HTTPScope) -> tuple[Target, Mapping[str, str]] | None:
        """Return where a request goes, and the parameters in its path; None if no route of the table has this path."""
        path = scope["path"]
        if path.endswith("/") or "//" in path:
            path = scope["path"] = normalize_path(path)  # as Litestar does
        for target in self._fixed.get(path, ()):
            if target.applies is None or target.applies(scope):
                return target, {}
        for pattern, target in self._others:
            if (found := pattern.fullmatch(path)) and (target.applies is None or target.applies(scope)):
                return target, found.groupdict()
        return None


def _to_pattern(path: str) -> re.Pattern[str]:
    """Return what matches the paths of a route: its own, with any values of its parameters."""
    parts = iter(_PARAMETER.split(path))
    pattern = re.escape(next(parts))
    for name, kind, rest in zip(parts, parts, parts, strict=True):
        pattern += f"(?P<{name}>{'[1-9][0-9]{0,17}' if kind == 'int' else '[^/]+'}){re.escape(rest)}"
    return re.compile(pattern)


def route_of(scope: Scope) -> str:
    """Return the template of a request's path, such as `/predict/{model}`, once the request has been answered."""
    return scope.get("path_template") or UNMATCHED


def note_route(scope: Scope, template: str) -> None:
    """Store the template of a path. Litestar does that as well, but not for what is rejected before it, and after a 405."""
    scope["path_template"] = template
