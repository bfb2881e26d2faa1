"""Guards of the detection routes: checks that run before the body is read."""

from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from app.api.content_type import is_supported, media_type
from app.api.context import context_of
from app.errors import UnsupportedMediaType

Connection = ASGIConnection[Any, Any, Any, Any]


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


def guard_timing(connection: Connection) -> None:
    """Start the clock of the request's stages; the first one is reading the body."""
    context_of(connection.scope).timing.start_lap()


def combine_guards(*guards: Callable[[Connection], None]) -> Guard:
    """Combine guards into one, in this order: Litestar copies the route handler for each guard of each request."""

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:  # a plain function would run in a thread
        for check in guards:
            check(connection)

    return guard
