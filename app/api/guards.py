"""Guards of routes: checks that run before the body is read."""

from collections.abc import Callable
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard, HTTPScope

from app.api import content_encoding
from app.api.client_watch import BodyLimits, body_too_large
from app.api.content_type import JSON, MULTIPART, URLENCODED, is_supported, media_type
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.keys import ApiKey, ApiKeys, Scope
from app.errors import Forbidden, MalformedRequest, UnsupportedMediaType

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
        admit_key(keys.identify(connection.scope["headers"]), scope, keys, context_of(connection.scope))

    return check


def admit_key(key: ApiKey, scope: Scope, keys: ApiKeys, context: RequestContext) -> None:
    """Let a request go on with its key, whose `share` it gets.

    Raises:
        Forbidden: The key does not have the scope.
    """
    context.log_fields["key"] = key.id
    context.share = keys.share_of(key)
    if scope not in key.scopes:
        raise Forbidden(f"the API key does not have the scope {scope!r}")


def guard_circuit(resources: WorkerResources) -> Check:
    """Make a check that rejects a request while Triton is known not to run its model.

    The check raises:
        CircuitOpen: The circuit of the model is open.
    """

    def check(connection: Connection) -> None:
        resources.pipeline.check_circuit(context_of(connection.scope).model)

    return check


def guard_payload(limits: BodyLimits) -> Check:
    """Make a check that rejects a body by its declared type and length, and sets the limits of any other in its context.

    The check raises:
        UnsupportedMediaType: The type is not one of an image or a form, or the body is compressed in a way that is not supported.
        BodyTooLarge: The length is above the limit.
        MalformedRequest: The length is not a number.
    """

    def check(connection: Connection) -> None:
        context = context_of(connection.scope)
        context.body_limits = limits
        declared = media_type(context.content_type)
        if not is_supported(declared):
            raise UnsupportedMediaType(
                f"{declared[:64]!r} is not supported; "
                "send image/*, application/octet-stream, multipart/form-data, application/json or application/x-www-form-urlencoded"
            )
        if context.content_encoding:
            content_encoding.check(context.content_encoding)
        if _declared_length(connection) > limits.max_bytes:
            raise body_too_large(limits.max_bytes)

    return check


def guard_batch_type(connection: Connection) -> None:
    """Reject a body that cannot contain several images.

    Raises:
        UnsupportedMediaType: It is neither a form nor JSON. What curl sends without being told the type may be JSON.
    """
    declared = media_type(context_of(connection.scope).content_type)
    if declared not in {MULTIPART, JSON, URLENCODED}:
        found = f"{declared[:64]!r} is not supported for a batch" if declared else "a batch needs a Content-Type header"
        raise UnsupportedMediaType(f"{found}; send multipart/form-data or application/json")


def _declared_length(connection: Connection) -> int:
    """Return the `Content-Length`, 0 if there is none. Litestar would make an object of all headers to find it.

    Raises:
        MalformedRequest: It is not a number.
    """
    declared = next((value for name, value in connection.scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit():
        raise MalformedRequest("the request's headers or body are malformed")
    return int(declared)


def guard_timing(connection: Connection) -> None:
    """Start the clock of the request's stages: its body is read next."""
    context_of(connection.scope).timing.start_lap()


def guard_body(*checks: Check) -> Check:
    """Combine checks of a request that has a body; OPTIONS, which a router answers with the methods of a path, has none."""

    def check(connection: Connection) -> None:
        if cast("HTTPScope", connection.scope)["method"] != HttpMethod.OPTIONS:
            for guard in checks:
                guard(connection)

    return check


class GuardedRoute(HTTPRouteHandler):
    """A route that hands itself to its guards: Litestar would make a copy for each request, attribute by attribute."""

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
