"""Guards of routes: checks that run before the body is read."""

from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers import HTTPRouteHandler
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from app.api.client_watch import BodyLimits
from app.api.content_type import is_supported, media_type
from app.api.context import context_of
from app.api.keys import ApiKeys, Scope
from app.errors import Forbidden, UnsupportedMediaType

Connection = ASGIConnection[Any, Any, Any, Any]
Check = Callable[[Connection], None]
"""Raises if the request is to be rejected."""


def guard_key(keys: ApiKeys, scope: Scope) -> Check:
    """Make a check that rejects a request without a key for this scope, and sets the `share` of any other in its context.

    The check raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """

    def check(connection: Connection) -> None:
        key = keys.identify(connection.scope["headers"])
        context = context_of(connection.scope)
        context.log_fields["key"] = key.id
        context.share = keys.share_of(key)
        if scope not in key.scopes:
            raise Forbidden(f"the API key does not have the scope {scope!r}")

    return check


def guard_payload(connection: Connection) -> None:
    """Reject a body by its declared type and length.

    Raises:
        UnsupportedMediaType: The type is not one of an image or a form.
        RequestEntityTooLarge: The length is above the route's limit.
    """
    declared = media_type(context_of(connection.scope).content_type)
    if not is_supported(declared):
        raise UnsupportedMediaType(
            f"{declared[:64]!r} is not supported; send image/*, application/octet-stream, multipart/form-data or application/json"
        )
    if isinstance(connection, Request):
        length, limit = connection.content_length, connection.route_handler.resolve_request_max_body_size()
        if length is not None and limit is not None and length > limit:
            raise RequestEntityTooLarge


def guard_timing(limits: BodyLimits) -> Check:
    """Make a check that starts the clock of the request's stages, and sets the limits of its body, which is read next."""

    def check(connection: Connection) -> None:
        context = context_of(connection.scope)
        context.body_limits = limits
        context.timing.start_lap()

    return check


class GuardedRoute(HTTPRouteHandler):
    """A route that hands itself to its guards; Litestar would hand a copy to them, at a tenth of the request's Python."""

    async def authorize_connection(self, connection: Connection) -> None:
        """Run the guards."""
        for guard in self.resolve_guards():
            await guard(connection, self)  # type: ignore[misc]


def combine_guards(*guards: Check) -> Guard:
    """Combine guards into one, in this order: Litestar copies the route handler for each guard of each request."""

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:  # a plain function would run in a thread
        for check in guards:
            check(connection)

    return guard
