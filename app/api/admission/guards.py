"""Guards: checks of a request before its body is received.

If several checks fail, the response reports the first in this order:

    400  the framing is wrong                                           `check_framing`
    404  no route has the path; 405 for the method                      Litestar
    401  no API key, or a wrong one; 403 if it lacks the scope          `guard_key`
    415  the declared type; 413 the declared length                     `guard_payload`
    503  the model's circuit is open                                    `guard_circuit`
    429  the gateway is full                                            `check_capacity`

`app.api.admission.dispatch` checks framing and capacity before Litestar is called. So a 429 may come before 415 and 413, but only
if the key is valid, none is needed, or it may come with the body. An open circuit still takes precedence over the 429.

A key in the body is checked by `admit_with_body`. Until then the request is anonymous: its body is limited to the size of one
image, must arrive within two seconds, and counts against a budget that all anonymous requests share. So 408 and 429 may come
before 401.
"""

import base64
import binascii
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qs

from litestar.connection import ASGIConnection
from litestar.enums import HttpMethod
from litestar.exceptions import NotFoundException
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard, HTTPScope

from app.api.admission.keys import ApiKey, Scope
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import MODEL_NAMES
from app.api.receiving import content_encoding
from app.api.receiving.body import needs_parsing
from app.api.receiving.client_watch import BodyLimits, body_too_large
from app.api.receiving.content_type import is_supported, media_type
from app.api.routes import ModelRoute
from app.errors import Forbidden, MalformedRequest, Unauthorized, UnsupportedMediaType

Connection = ASGIConnection[Any, Any, Any, Any]

MAX_PATH = 1024
"""Maximum length of a path, in characters. The longest valid paths contain a model name."""
_MAX_PARAMETERS = 64
_LENGTH_DIGITS = 19
_TEXT_BYTES = 1 << 16
_ANONYMOUS_SECONDS = 2.0


def check_framing(scope: HTTPScope) -> None:
    """Reject a request that servers and proxies may interpret differently, or that is slow to parse or route.

    Raises:
        MalformedRequest: An HTTP/1.1 request has no Host or several; Content-Length is not a number; or the path or the query is
            too long.
    """
    if len(scope["path"]) > MAX_PATH or scope["query_string"].count(b"&") >= _MAX_PARAMETERS:
        raise MalformedRequest(f"the path has more than {MAX_PATH} characters, or the query more than {_MAX_PARAMETERS} parameters")
    hosts = 0
    for name, value in scope["headers"]:
        if name == b"host":
            hosts += 1
        elif name == b"content-length" and not (value.isdigit() and len(value) < _LENGTH_DIGITS):
            raise MalformedRequest("Content-Length is not a number")
    if hosts != 1 and scope["http_version"] == "1.1":
        raise MalformedRequest(f"a request has one Host header, found {hosts}")


def note_model(scope: HTTPScope, route: ModelRoute, path_values: Mapping[str, str], worker: WorkerResources) -> str:
    """Record the model that a request names in its path, headers or query, and return the model's reference.

    The reference is that of the default model if the request names none, and empty if the body must name one. The body may still
    name another model or version. Until it is received, the model named here is used, in its newest version by default.
    """
    query = scope["query_string"]
    values = parse_qs(query.decode("latin-1")) if b"model" in query or b"version" in query else {}
    named = path_values.get("model") or header_of(scope, route.model_header)
    named = named or next((values[name][0] for name in MODEL_NAMES if name in values), "")
    pipeline, context = worker.pipeline, context_of(scope)
    name = named or (pipeline.default_for(route.task) if route.task is not None else "")
    model = name and pipeline.refer_to(name, path_values.get("version") or values.get("version", [""])[0])
    if named or not needs_parsing(context.content_type):
        context.model = model
        if pipeline.is_known(name):
            context.log_fields["model"] = name
    return model


def note_key(scope: HTTPScope, route: ModelRoute, worker: WorkerResources) -> None:
    """Record the request's key if it is valid; otherwise `guard_key` rejects the request later."""
    if worker.keys is None:
        return
    context = context_of(scope)
    headers = _key_headers(scope, is_dialect=route.key_in != "header")
    context.is_anonymous = not headers and route.key_in == "body"
    with suppress(Unauthorized):
        _accept(worker.keys.identify(headers), worker, context)


async def check_capacity(scope: HTTPScope, route: ModelRoute, model: str, worker: WorkerResources) -> None:
    """Reject a request that would pass `guard_key` while the gateway is full.

    Raises:
        GatewayFull: The request cannot be admitted now.
    """
    context, pipeline = context_of(scope), worker.pipeline
    if context.api_key is not None and "detect" not in context.api_key.scopes:
        return
    # While the circuit is open, `guard_circuit` rejects the request: unanswered calls to Triton may have filled the gateway.
    if route.takes != "text" and (not model or pipeline.is_usable(model)):
        await pipeline.admission.check(model, context.share, is_batch=route.takes == "images")


def guard_model(worker: WorkerResources) -> Guard:
    """Make the guard of all routes that run a model; requests to other routes pass it."""

    async def guard(connection: Connection, route: BaseRouteHandler) -> None:  # a plain function would run in a thread
        scope = cast("HTTPScope", connection.scope)
        if not isinstance(route, ModelRoute) or scope["method"] != HttpMethod.POST:
            return
        context = context_of(scope)
        if not context.has_model_route:
            raise NotFoundException  # Litestar matches some paths that the table does not, such as non-ASCII digits
        guard_key(scope, route, worker)
        guard_payload(scope, route, worker)
        if route.takes != "text":
            guard_circuit(context, worker)
        guard_timing(context, worker)

    return guard


def guard_scope(worker: WorkerResources, scope: Scope) -> Guard:
    """Make the guard of routes that need a key with this scope, but run no model.

    The guard raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        _check_key(_key_headers(connection.scope), scope, context_of(connection.scope), worker)

    return guard


def require_key(connection: Connection, worker: WorkerResources) -> None:
    """Reject a dialect's request that runs no model and lacks a key with the scope `detect`; pass it if keys are not configured.

    Raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    context = context_of(connection.scope)
    if context.api_key is None:
        _check_key(_key_headers(connection.scope, is_dialect=True), "detect", context, worker)


def guard_key(scope: HTTPScope, route: ModelRoute, worker: WorkerResources) -> None:
    """Reject a request without a key with the scope `detect`, unless its body may contain one.

    Raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    context = context_of(scope)
    if context.api_key is not None:
        _require_scope(context.api_key, "detect")
    elif worker.keys is not None and not context.is_anonymous:  # repeated, to raise the error
        _check_key(_key_headers(scope, is_dialect=route.key_in != "header"), "detect", context, worker)


def admit_with_body(given: str | None, context: RequestContext, worker: WorkerResources) -> None:
    """Reject an anonymous request whose body contains no key with the scope `detect`.

    Raises:
        Unauthorized: There is no key, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    if context.is_anonymous:
        _check_key([(b"x-api-key", given.encode())] if given else [], "detect", context, worker)
        context.is_anonymous = False
        context.body_limits = BodyLimits(context.max_body_bytes, *worker.deployment.body_limits[1:])  # the limits of the response


def guard_payload(scope: HTTPScope, route: ModelRoute, worker: WorkerResources) -> None:
    """Reject a body by its declared type and length, and store the length limit in the context.

    Raises:
        UnsupportedMediaType: The route does not accept the type, or the content encoding is not supported.
        BodyTooLarge: The declared length exceeds the limit.
    """
    context, deployment = context_of(scope), worker.deployment
    declared = media_type(context.content_type)
    if route.media_types:
        if declared not in route.media_types:
            found = f"{declared[:64]!r} is not supported for a batch" if declared else "a batch needs a Content-Type header"
            raise UnsupportedMediaType(f"{found}; send multipart/form-data or application/json")
    elif not is_supported(declared):
        raise UnsupportedMediaType(
            f"{declared[:64]!r} is not supported; "
            "send image/*, application/octet-stream, multipart/form-data, application/json or application/x-www-form-urlencoded"
        )
    if context.content_encoding:
        content_encoding.check(context.content_encoding)
    limits = deployment.batch_limits if route.takes == "images" and not context.is_anonymous else deployment.body_limits
    max_bytes = _TEXT_BYTES if route.takes == "text" else limits.max_bytes
    if int(header_of(scope, b"content-length") or "0") > max_bytes:
        raise body_too_large(max_bytes)
    context.max_body_bytes = max_bytes


def guard_circuit(context: RequestContext, worker: WorkerResources) -> None:
    """Reject a request while the circuit of its model is open. Anonymous requests pass: they must not learn about models.

    Raises:
        CircuitOpen: The circuit of the model is open.
    """
    if context.model and not context.is_anonymous:
        worker.pipeline.check_circuit(context.model)


def guard_timing(context: RequestContext, worker: WorkerResources) -> None:
    """Set the time limits of the body and the response and the slow-request threshold, and start the stage timing."""
    _, pause, total = worker.deployment.body_limits
    if context.is_anonymous:
        pause = total = _ANONYMOUS_SECONDS
    context.body_limits = BodyLimits(context.max_body_bytes, pause, total)
    context.slow_request_ms = worker.deployment.slow_request_ms
    context.timing.start_lap()


def _check_key(headers: list[tuple[bytes, bytes]], scope: Scope, context: RequestContext, worker: WorkerResources) -> None:
    if worker.keys is not None:
        _accept(worker.keys.identify(headers), worker, context)
        _require_scope(context.api_key, scope)


def _accept(key: ApiKey, worker: WorkerResources, context: RequestContext) -> None:
    assert worker.keys is not None  # noqa: S101
    context.api_key = key
    context.log_fields["key"] = key.id
    context.share = worker.keys.share_of(key)


def _require_scope(key: ApiKey | None, scope: Scope) -> None:
    if key is None or scope not in key.scopes:
        raise Forbidden(f"the API key does not have the scope {scope!r}")


def _key_headers(scope: Any, *, is_dialect: bool = False) -> list[tuple[bytes, bytes]]:  # noqa: ANN401 - Litestar has two types
    """Return the headers with a key. Clients of dialects may send it as `Basic`, or in the query if no header has one."""
    headers = [(name, value) for name, value in scope["headers"] if name in {b"authorization", b"x-api-key"}]
    if not is_dialect:
        return headers
    if not headers and (b"api_key" in scope["query_string"] or b"%" in scope["query_string"]):
        values = parse_qs(scope["query_string"].decode("latin-1")).get("api_key", [])
        return [(b"x-api-key", value.encode()) for value in values]
    return [(name, _to_bearer(value)) for name, value in headers]


def _to_bearer(authorization: bytes) -> bytes:
    """Convert `Basic` with user ID and password SECRET to `Bearer ID.SECRET`; return any other header unchanged."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(encoded.strip(), validate=True).replace(b":", b".", 1)
    except binascii.Error:
        return authorization


def header_of(scope: HTTPScope, wanted: bytes) -> str:
    """Return the value of a header; empty if absent. Unlike Litestar's lookup, it builds no object of all headers."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
