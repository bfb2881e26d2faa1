"""Convert every exception to a response of type application/problem+json."""

from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from app.api.body import body_too_large
from app.api.context import context_of
from app.api.schema import Problem
from app.errors import ClientGone, GatewayError, InvalidParameter, MalformedRequest, Unauthorized

MEDIA_TYPE = "application/problem+json"

LOG = structlog.get_logger()


def handlers() -> ExceptionHandlersMap:
    """Return the handlers of all exceptions."""
    return {GatewayError: _from_gateway_error, HTTPException: _from_http_exception, Exception: _from_exception}


_DETAILS = {
    HTTPStatus.NOT_FOUND: "this path does not exist; /docs lists those that do",
    HTTPStatus.METHOD_NOT_ALLOWED: "this path does not support this method; /docs lists those it supports",
}


def _from_gateway_error(request: Request[Any, Any, Any], error: GatewayError) -> Response[bytes]:
    context = context_of(request.scope)
    if isinstance(error, InvalidParameter):  # the text repeats what the caller sent, which is not for the log
        context.is_detail_logged = False
    elif error.__cause__ is not None:
        context.log_fields["cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"[:500]
    headers = {} if error.retry_after_seconds is None else {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, ClientGone):  # a client that still reads the response has sent a broken body instead
        context.is_client_gone = True
        return _respond(request, HTTPStatus.BAD_REQUEST, (error.code, error.title, error.detail), headers)
    return _respond(request, error.status, (error.code, error.title, error.detail), headers)


def _from_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        limit = request.route_handler.resolve_request_max_body_size() or 0
        return _from_gateway_error(request, body_too_large(limit))
    if error.status_code == HTTPStatus.BAD_REQUEST:
        return _from_gateway_error(request, MalformedRequest("the request's headers or body are malformed"))
    status = HTTPStatus(error.status_code)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _from_exception(request, error)
    detail = _DETAILS.get(status, status.description or status.phrase)
    return _respond(request, status, (status.name.lower(), status.phrase, detail), dict(error.headers or {}))


def _from_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    LOG.error("unexpected exception", request_id=context_of(request.scope).request_id, exc_info=error)
    text = "internal_error", "Internal error", "the failure has been logged with this request_id"
    return _respond(request, HTTPStatus.INTERNAL_SERVER_ERROR, text, {})


def _respond(request: Request[Any, Any, Any], status: int, text: tuple[str, str, str], headers: dict[str, str]) -> Response[bytes]:
    """Make the response; `text` is the problem's code, title and detail."""
    code, title, detail = text
    context = context_of(request.scope)
    context.log_fields["code"] = code
    if context.is_detail_logged:
        context.log_fields["detail"] = detail
    problem = Problem(f"urn:nereid:problem:{code}", title, status, detail, code, context.request_id)
    return Response(msgspec.json.encode(problem), status_code=status, media_type=MEDIA_TYPE, headers=headers)
