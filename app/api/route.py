"""Name the route of a request, for logs, metrics and traces."""

from contextlib import suppress
from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.types import Scope
from litestar.utils import normalize_path

UNMATCHED = "unmatched"
"""The route of a path that does not exist. The path itself would be a name of its own for each mistake of a caller."""


def route_of(scope: Scope) -> str:
    """Return the template of a request's path, such as `/predict/{model}`, once the request has been answered."""
    return scope.get("path_template") or UNMATCHED


def note_route(scope: Scope, template: str) -> None:
    """Store the template of a path that Litestar does not see. For all others Litestar does that, except after a 405."""
    scope["path_template"] = template


def note_route_of_other_method(request: Request[Any, Any, Any], method: str) -> None:
    """Store the template of a path that has a route for `method`, but none for the method of the request."""
    with suppress(HTTPException):
        *_, template = request.app.asgi_router.handle_routing(path=normalize_path(request.scope["path"]), method=method)
        note_route(request.scope, template)
