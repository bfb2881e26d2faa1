"""Routes that run a model, and the table that finds the route of a path."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.types import ExceptionHandlersMap, HTTPScope, Scope
from litestar.utils import normalize_path

from app.model.heads import DetectionHead, Task

API_VERSION = "v1"
DOCS, SEARCH_DOCS = "/docs", "/search/docs"
"""Where the routes are described; and those of the process that searches beside workers, to whoever asks a worker."""
VERSION = f"/{API_VERSION}"
UNMATCHED = "unmatched"
"""The route of paths that do not exist. Logs and metrics use it, because arbitrary paths would be unbounded."""

_PARAMETER = re.compile(r"\{(\w+):(str|int)\}")


class ModelRoute(HTTPRouteHandler):
    """A route that runs a model, with the properties that admission needs."""

    def __init__(  # noqa: PLR0913 - properties of a route
        self,
        path: str | list[str],
        *,
        task: Task | None = DetectionHead.task,
        takes: Literal["image", "images", "text"] = "image",
        media_types: frozenset[str] = frozenset(),
        key_in: Literal["header", "query", "body"] = "header",
        is_get: bool = False,
        has_streams: bool = False,
        scope: str = "detect",
        **options: Any,  # noqa: ANN401 - Litestar's options
    ) -> None:
        """Describe a route, whose parameters `model` and `version` name the model.

        `task` is that of the default model; None if the body has to name one. `takes`: one image, one or several, or none. Of no
        `media_types`, what is no form or JSON may be an image, whatever type is declared. The API key may also be in the query,
        with `body` in the body, too. GET runs no model. With `has_streams`, the header X-Stream names the stream of the image.
        """
        methods = [HttpMethod.POST, *([HttpMethod.GET] if is_get else [])]
        super().__init__(path, http_method=methods, status_code=200, **options)
        self.task = task
        self.takes = takes
        self.media_types = media_types
        self.key_in = key_in
        self.has_streams = has_streams
        self.scope = scope
        self._exception_handlers: ExceptionHandlersMap | None = None

    def resolve_exception_handlers(self) -> ExceptionHandlersMap:
        """Return the exception handlers. Litestar's implementation would collect them from all layers for each request."""
        if self._exception_handlers is None:
            self._exception_handlers = super().resolve_exception_handlers()
        return self._exception_handlers

    async def authorize_connection(self, connection: ASGIConnection[Any, Any, Any, Any]) -> None:
        """Run the guards if the request runs the model. Litestar's implementation would copy the route for each guard."""
        if connection.scope["method"] != HttpMethod.POST:  # type: ignore[typeddict-item]  # that of HTTP
            return
        for guard in self.resolve_guards():
            await guard(connection, self)  # type: ignore[misc]


class Target(NamedTuple):
    """The target of requests at a path."""

    handler: HTTPRouteHandler
    template: str
    """The path for logs and metrics, such as `/predict/{model}`."""
    prefix: str = ""
    """Prepended to the path of a dialect, whose routes Litestar has below the dialect's name."""
    applies: Callable[[HTTPScope], bool] | None = None


class RouteTable:
    """Finds the route of a request before Litestar does. Of several with the same path, the first one that applies gets it."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, Target]] = []
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
        """Add routes whose paths have a prefix in Litestar, which clients may not send. `applies`: predicates by path."""
        for handler in handlers:
            for path in sorted(handler.paths):
                template = prefix + _PARAMETER.sub(r"{\1}", path)
                target = Target(handler, template, "" if is_prefix_sent else prefix, (applies or {}).get(path))
                sent = prefix + path if is_prefix_sent else path
                self.paths.append((sent, target))
                if "{" in sent:
                    self._others.append((_to_pattern(sent), target))
                else:
                    self._fixed.setdefault(sent, []).append(target)

    def find(self, scope: HTTPScope) -> tuple[Target, Mapping[str, str]] | None:
        """Return the target of a request and the parameters in its path; None if no route of the table matches."""
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
    parts = iter(_PARAMETER.split(path))
    pattern = re.escape(next(parts))
    for name, kind, rest in zip(parts, parts, parts, strict=True):
        pattern += f"(?P<{name}>{'[1-9][0-9]{0,17}' if kind == 'int' else '[^/]+'}){re.escape(rest)}"
    return re.compile(pattern)


PROBES = frozenset(
    (
        "/livez",
        "/live",
        "/livez/triton",
        "/readyz",
        "/ready",
        *(f"/v{n}/health/{state}" for n in (1, 2) for state in ("live", "ready")),
    )
)
"""The routes that something asks every few seconds."""


def route_of(scope: Scope) -> str:
    """Return the template of a request's path, such as `/predict/{model}`; available after the response."""
    return scope.get("path_template") or UNMATCHED


def note_route(scope: Scope, template: str) -> None:
    """Store the template of a path. Litestar does not store it for a 405 or for requests rejected before routing."""
    scope["path_template"] = template
