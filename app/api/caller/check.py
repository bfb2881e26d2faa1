"""The check of a request's API key. Without configured keys (`keys` is None), every request passes."""

import base64
import binascii
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard, HTTPScope

from app.api.caller.keys import ApiKeys
from app.api.context import RequestContext, context_of, header_of
from app.api.routes import ModelRoute
from app.errors import Forbidden, Unauthorized

Connection = ASGIConnection[Any, Any, Any, Any]


def note_key(scope: HTTPScope, route: ModelRoute, keys: ApiKeys) -> None:
    """Record the request's key if it is valid; otherwise `require_key` rejects the request later."""
    context = context_of(scope)
    headers = _key_headers(scope, is_dialect=route.key_in != "header")
    context.scope = route.scope
    context.is_anonymous = not headers and route.key_in == "body"
    with suppress(Unauthorized):
        _identify(headers, keys, context)


def guard_scope(keys: ApiKeys | None, wanted: str) -> Guard:
    """Make the guard of routes that run no model, and need a key with this scope or that in their `opt`."""

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:  # a plain function would run in a thread
        require_key(connection, keys, handler.opt.get("scope", wanted), is_dialect=False)

    return guard


def require_key(connection: Connection, keys: ApiKeys | None, wanted: str | None, *, is_dialect: bool) -> None:
    """Raise Unauthorized unless the headers have exactly one key, a valid one, and Forbidden if it does not have this scope."""
    if keys is None:
        return
    context = context_of(connection.scope)
    if context.scopes is None:
        _identify(_key_headers(connection.scope, is_dialect=is_dialect), keys, context)
    if wanted is not None:
        require_scope(context, keys, wanted)


def require_scope(context: RequestContext, keys: ApiKeys | None, wanted: str) -> None:
    """Raise Forbidden if a request that has been identified needs another scope, because of what it asks for."""
    if keys is not None and wanted not in (context.scopes or ()):
        raise Forbidden(f"the API key does not have the scope {wanted!r}; its `scopes` in the file of keys can be extended")


def admit_with_body(given: str | None, context: RequestContext, keys: ApiKeys, total_seconds: float) -> None:
    """Apply `require_key` to an anonymous request, whose body may contain a key; then its response has the time of others."""
    _identify([(b"x-api-key", given.encode())] if given else [], keys, context)
    require_scope(context, keys, context.scope)
    context.is_anonymous = False
    context.body_limits = context.body_limits._replace(total_seconds=total_seconds)


def _identify(headers: list[tuple[bytes, bytes]], keys: ApiKeys, context: RequestContext) -> None:
    key = keys.identify(headers)
    context.scopes = key.scopes
    context.log_fields["key"] = key.id
    context.caller = key.caller
    context.tenant = key.tenant


def _key_headers(scope: Any, *, is_dialect: bool) -> list[tuple[bytes, bytes]]:  # noqa: ANN401 - Litestar has two types
    """Return the headers with a key. Clients of dialects may send it as `Basic`, or in the query if no header has one."""
    headers = [(name, value) for name, value in scope["headers"] if name in {b"authorization", b"x-api-key"}]
    if not is_dialect:
        return headers
    if not headers and (b"api_key" in scope["query_string"] or b"%" in scope["query_string"]):
        values = parse_qs(scope["query_string"].decode("latin-1")).get("api_key", [])
        return [(b"x-api-key", value.encode()) for value in values]
    return [(name, _to_bearer(value)) for name, value in headers]


def _to_bearer(authorization: bytes) -> bytes:
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(encoded.strip(), validate=True).replace(b":", b".", 1)
    except binascii.Error:
        return authorization


async def guard_origin(connection: Connection, _: BaseRouteHandler) -> None:
    """Raise Forbidden for a request that the page of another origin has made."""
    origin = header_of(connection.scope, b"origin")  # type: ignore[arg-type]
    host = header_of(connection.scope, b"host")  # type: ignore[arg-type]
    if origin and origin.partition("://")[2] != host:
        raise Forbidden("this is not accepted from a page of another origin")
