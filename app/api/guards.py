"""What a request must pass before its body is received.

If several causes hold, the caller is told the first of this order:

    400  the framing is wrong                                           `check_framing`
    404  no route has the path; 405 for the method                      Litestar
    401  no API key, or a wrong one; 403 if it lacks the scope          `guard_key`
    415  the declared type; 413 the declared length                     `guard_payload`
    503  the model's circuit is open                                    `guard_circuit`
    429  the gateway is full                                            `check_capacity`

`app.api.dispatch` checks framing and capacity before Litestar is called. So a 429 may come before 415 and 413, but only where the
key is known, none is needed, or it may come with the body. An open circuit still comes before it.

A key that comes with the body is checked by `admit_with_body`. Until then the request is anonymous: its body may be as large as
one image, must come within two seconds, and counts in a budget that all anonymous requests share. So 408 and 429 may come before
401.
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

from app.api import content_encoding
from app.api.body import needs_parsing
from app.api.client_watch import BodyLimits, body_too_large
from app.api.content_type import is_supported, media_type
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.keys import ApiKey, Scope
from app.api.parameters import MODEL_NAMES
from app.api.routes import ModelRoute
from app.errors import Forbidden, MalformedRequest, Unauthorized, UnsupportedMediaType

Connection = ASGIConnection[Any, Any, Any, Any]

MAX_PATH = 1024
"""Characters of a path; the longest that has a meaning here has a model's name in it."""
_MAX_PARAMETERS = 64
_LENGTH_DIGITS = 19
_TEXT_BYTES = 1 << 16
_ANONYMOUS_SECONDS = 2.0


def check_framing(scope: HTTPScope) -> None:
    """Reject a request that servers and proxies may read in different ways, or that takes long to read or to route.

    Raises:
        MalformedRequest: In HTTP/1.1 it has no Host, or several; its Content-Length is not a number; or path or query are longer
            than any that has a meaning here.
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
    """Note which model a request names in path, headers or query, and return its reference.

    It is that of the default model if none is named, and empty if the body must name one. The body may still name another model or
    version. Until it is received, the model named here counts, in its newest version unless the request says otherwise.
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
    """Note whose request it is, as far as it has a valid key; if it has none, `guard_key` rejects it."""
    if worker.keys is None:
        return
    context = context_of(scope)
    headers = _key_headers(scope, is_dialect=route.key_in != "header")
    context.is_anonymous = not headers and route.key_in == "body"
    with suppress(Unauthorized):
        _accept(worker.keys.identify(headers), worker, context)


async def check_capacity(scope: HTTPScope, route: ModelRoute, model: str, worker: WorkerResources) -> None:
    """Reject a request while the gateway is full, if it would pass `guard_key`.

    Raises:
        GatewayFull: It would not be admitted now.
    """
    context, pipeline = context_of(scope), worker.pipeline
    if context.api_key is not None and "detect" not in context.api_key.scopes:
        return
    # While the circuit is open, a guard rejects the request for that: calls that Triton did not answer may have filled the gateway.
    if route.takes != "text" and (not model or pipeline.is_usable(model)):
        await pipeline.admission.check(model, context.share, is_batch=route.takes == "images")


def guard_model(worker: WorkerResources) -> Guard:
    """Make the guard of all routes at which models are asked; other routes pass it."""

    async def guard(connection: Connection, route: BaseRouteHandler) -> None:  # a plain function would run in a thread
        scope = cast("HTTPScope", connection.scope)
        if not isinstance(route, ModelRoute) or scope["method"] != HttpMethod.POST:
            return
        context = context_of(scope)
        if not context.has_model_route:
            raise NotFoundException  # Litestar takes a path for the route's that the table does not, such as one with other digits
        guard_key(scope, route, worker)
        guard_payload(scope, route, worker)
        if route.takes != "text":
            guard_circuit(context, worker)
        guard_timing(context, worker)

    return guard


def guard_scope(worker: WorkerResources, scope: Scope) -> Guard:
    """Make the guard of routes that need a key for this scope, but ask no model.

    The guard raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        _check_key(_key_headers(connection.scope), scope, context_of(connection.scope), worker)

    return guard


def require_key(connection: Connection, worker: WorkerResources) -> None:
    """Reject a request to a dialect that asks no model, unless it has a key for the scope `detect`, or there are no keys.

    Raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    context = context_of(connection.scope)
    if context.api_key is None:
        _check_key(_key_headers(connection.scope, is_dialect=True), "detect", context, worker)


def guard_key(scope: HTTPScope, route: ModelRoute, worker: WorkerResources) -> None:
    """Reject a request without a key for the scope `detect`, unless its body may have one.

    Raises:
        Unauthorized: There is no key, more than one, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    context = context_of(scope)
    if context.api_key is not None:
        _require_scope(context.api_key, "detect")
    elif worker.keys is not None and not context.is_anonymous:  # once more, for the error
        _check_key(_key_headers(scope, is_dialect=route.key_in != "header"), "detect", context, worker)


def admit_with_body(given: str | None, context: RequestContext, worker: WorkerResources) -> None:
    """Reject an anonymous request without a key for the scope `detect` in its body.

    Raises:
        Unauthorized: There is no key, or a wrong one.
        Forbidden: The key does not have the scope.
    """
    if context.is_anonymous:
        _check_key([(b"x-api-key", given.encode())] if given else [], "detect", context, worker)
        context.is_anonymous = False
        context.body_limits = BodyLimits(context.max_body_bytes, *worker.deployment.body_limits[1:])  # for its answer


def guard_payload(scope: HTTPScope, route: ModelRoute, worker: WorkerResources) -> None:
    """Reject a body by its declared type and length, and note in its context how long any other may be.

    Raises:
        UnsupportedMediaType: The route does not take the type, or the body is compressed in a way that is not supported.
        BodyTooLarge: The length is above the limit.
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
    """Reject a request while Triton is known not to run its model; of a model, an anonymous one is told nothing.

    Raises:
        CircuitOpen: The circuit of the model is open.
    """
    if context.model and not context.is_anonymous:
        worker.pipeline.check_circuit(context.model)


def guard_timing(context: RequestContext, worker: WorkerResources) -> None:
    """Set how long its body, and the answer, may take and when the request counts as slow, and start the clock of its stages."""
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
    """Return the headers with a key. Clients of dialects may have it in `Basic`, or in the query if no header has one."""
    headers = [(name, value) for name, value in scope["headers"] if name in {b"authorization", b"x-api-key"}]
    if not is_dialect:
        return headers
    if not headers and (b"api_key" in scope["query_string"] or b"%" in scope["query_string"]):
        values = parse_qs(scope["query_string"].decode("latin-1")).get("api_key", [])
        return [(b"x-api-key", value.encode()) for value in values]
    return [(name, _to_bearer(value)) for name, value in headers]


def _to_bearer(authorization: bytes) -> bytes:
    """Make `Bearer ID.SECRET` of a header with the user ID and the password SECRET; leave any other as it is."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(encoded.strip(), validate=True).replace(b":", b".", 1)
    except binascii.Error:
        return authorization


def header_of(scope: HTTPScope, wanted: bytes) -> str:
    """Return the value of a header, empty if there is none. Litestar would make an object of all headers to find it."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
