"""Guards: checks of a request before its body is received.

If several checks fail, the response reports the first in this order:

    400  the framing is wrong                                           `check_framing`
    404  no route has the path; 405 for the method                      Litestar
    401  no API key, or a wrong one; 403 if it lacks the scope          `guard_key`
    415  the declared encoding, or type of a batch; 413 the length,     `guard_payload`
         400 the name of a stream
    503  the model's circuit is open                                    `guard_circuit`
    429  the gateway is full                                            `check_capacity`

`DispatchMiddleware` checks framing and capacity before Litestar is called. So a 429 may come before 415 and 413, but only if the
key is valid, none is needed, or it may come with the body, which `admit_with_body` checks. Until then the request is anonymous: its
body must arrive within two seconds, and counts against a budget that all anonymous requests share.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import cast
from urllib.parse import parse_qs

from litestar.exceptions import NotFoundException
from litestar.types import Guard, HTTPScope

from app.api.caller.check import Connection, require_key
from app.api.context import STREAM_PATTERN, RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import MODEL_NAMES
from app.api.receiving import content_encoding
from app.api.receiving.body import needs_parsing
from app.api.receiving.client_watch import body_too_large
from app.api.receiving.content_type import media_type
from app.api.routes import ModelRoute
from app.errors import InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.model.reference import split_reference

MAX_PATH = 1024
_MAX_PARAMETERS = 64
_LENGTH_DIGITS = 19
_TEXT_BYTES = 1 << 16
_ANONYMOUS_SECONDS = 2.0


def check_framing(scope: HTTPScope) -> None:
    """Raise MalformedRequest if servers and proxies may interpret the request differently, or if it is slow to parse or route."""
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


def note_model(
    scope: HTTPScope, context: RequestContext, route: ModelRoute, path_values: Mapping[str, str], worker: WorkerResources
) -> str:
    """Note the model that path or query name; return its reference, else the default model's, or "" if the body may name it."""
    query, named, pipeline = scope["query_string"], path_values.get("model", ""), worker.pipeline
    values = parse_qs(query.decode("latin-1")) if b"model" in query or b"version" in query else {}
    if values and not named:
        named = next((values[name][0] for name in MODEL_NAMES if name in values), "")
    version = path_values.get("version") or values.get("version", [""])[0]
    cascade = worker.catalog.own(path_values["model"]) if "model" in path_values else None
    if cascade is not None:  # its first model admits the request
        context.log_fields["cascade"] = named
        named, own_version = split_reference(cascade.model)
        version = own_version or version
    name = named or (pipeline.default_for(route.task) if route.task is not None else "")
    model = name and pipeline.refer_to(name, version)
    if named or not needs_parsing(context.content_type):
        context.model = model
        context.log_fields |= pipeline.log_fields(name)
    return model


def check_capacity(context: RequestContext, route: ModelRoute, model: str, worker: WorkerResources) -> None:
    """Raise GatewayFull if a request that would pass `require_key` cannot be admitted now; note an open circuit."""
    pipeline = worker.pipeline
    if route.takes == "text" or (context.scopes is not None and route.scope not in context.scopes):
        return
    # Then `guard_circuit` rejects the request: unanswered calls to Triton may have filled the gateway.
    context.is_circuit_open = bool(model) and not pipeline.tritons.is_usable(model)
    if not context.is_circuit_open:
        is_batch = route.takes == "images"
        pipeline.admission.check(split_reference(model)[0], context.caller, is_batch=is_batch, is_frame=bool(context.stream))


async def guard_key(worker: WorkerResources, connection: Connection, route: ModelRoute) -> None:
    """Raise NotFoundException for a path of no route, and Unauthorized or Forbidden by the key, unless the body may have one."""
    context = context_of(connection.scope)
    if not context.has_model_route:
        raise NotFoundException  # Litestar matches some paths that the table does not, such as non-ASCII digits
    if worker.keys is not None and not context.is_anonymous:
        require_key(connection, worker.keys, route.scope, is_dialect=route.key_in != "header")


async def guard_payload(worker: WorkerResources, connection: Connection, route: ModelRoute) -> None:
    """Raise UnsupportedMediaType, BodyTooLarge or InvalidParameter by what the headers declare; note the limits in the context.

    A single body of any other type than a form or JSON may be an image, which its first bytes show.
    """
    context, deployment = context_of(connection.scope), worker.deployment
    declared = media_type(context.content_type)
    if route.media_types and declared not in route.media_types:
        found = f"{declared[:64]!r} is not supported for a batch" if declared else "a batch needs a Content-Type header"
        raise UnsupportedMediaType(f"{found}; send multipart/form-data or application/json")
    if context.content_encoding:
        content_encoding.check(context.content_encoding)
    if context.stream and not re.fullmatch(STREAM_PATTERN, context.stream):
        raise InvalidParameter("X-Stream has 1 to 64 letters, digits, and characters of . _ -")
    limits = deployment.batch_limits if route.takes == "images" and not context.is_anonymous else deployment.body_limits
    if route.takes == "text":
        limits = limits._replace(max_bytes=_TEXT_BYTES)
    if context.is_anonymous:
        limits = limits._replace(total_seconds=_ANONYMOUS_SECONDS)
    if int(context.headers.get(b"content-length") or b"0") > limits.max_bytes:
        raise body_too_large(limits.max_bytes)
    context.body_limits = limits


async def guard_circuit(worker: WorkerResources, connection: Connection, _: ModelRoute) -> None:
    """Raise CircuitOpen if `check_capacity` has found the circuit of the model that the request names open everywhere."""
    context = context_of(connection.scope)
    if context.is_circuit_open and context.model:
        worker.pipeline.check_circuit(context.model)


async def guard_timing(worker: WorkerResources, connection: Connection, _: ModelRoute) -> None:
    """Set the slow-request threshold, and start the stage timing."""
    context = context_of(connection.scope)
    context.slow_request_ms = worker.deployment.slow_request_ms
    context.timing.start_lap()


def model_guards(worker: WorkerResources) -> list[Guard]:
    """Make the guards of routes that run a model."""
    # They do not wait, but Litestar would run plain functions in threads.
    guards = (guard_key, guard_payload, guard_circuit, guard_timing)
    return cast("list[Guard]", [partial(guard, worker) for guard in guards])
