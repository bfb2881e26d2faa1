"""Conversion of exceptions to responses: application/problem+json, or the error format of a dialect."""

from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.routes import HTTPRoute
from litestar.types import ExceptionHandlersMap, Scope, Send
from litestar.utils import normalize_path

from app.api.answering.schema import Problem
from app.api.context import RequestContext, context_of
from app.api.dependencies import worker_of
from app.api.routes import DOCS, SEARCH_DOCS, ModelRoute, note_route
from app.errors import (
    ClientGone,
    DeadlinePassed,
    GatewayError,
    GatewayFull,
    InvalidParameter,
    MalformedRequest,
    Unauthorized,
    UnknownModel,
)
from app.expected import suggestion

MEDIA_TYPE = "application/problem+json"

_EXAMPLES = {
    "image": "the image with POST, for example with curl --data-binary @image.jpg",
    "images": "the images with POST, for example with curl -F images=@first.jpg -F images=@second.jpg",
}
"""How to send what a route takes."""
_MAX_METHOD = 16
_SIMILARITY = 0.7

LOG = structlog.get_logger()


WriteError = Callable[[Problem, Scope], tuple[int, str, bytes]]
"""Encodes a problem as the status, media type and body of the response to the request with this scope."""


def write(problem: Problem, _: Scope | None = None) -> tuple[int, str, bytes]:
    """Encode a problem according to RFC 9457."""
    return problem.status, MEDIA_TYPE, msgspec.json.encode(problem)


def handlers(write: WriteError = write) -> ExceptionHandlersMap:
    """Return the handlers for all exceptions."""

    def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        context = context_of(request.scope)
        if isinstance(error, ValidationException) and isinstance(error.extra, list):
            error = InvalidParameter("; ".join(f"{each.get('key') or 'the body'}: {each['message']}" for each in error.extra))
        elif isinstance(error, RecursionError):  # JSON that is nested too deep
            error = MalformedRequest("the request's body is malformed")
        elif isinstance(error, HTTPException) and error.status_code == HTTPStatus.BAD_REQUEST:
            error = MalformedRequest("the request's headers or body are malformed")
        headers: dict[str, str] = {}
        if isinstance(error, GatewayError):
            headers, problem = _from_gateway_error(context, error)
        elif isinstance(error, HTTPException) and error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            headers, problem = _from_http_exception(request, error)
        else:
            problem = to_problem(error, context.request_id)
        _note(context, problem)
        status, media_type, body = write(problem, request.scope)
        return Response(body, status_code=status, media_type=media_type, headers=headers)

    return {GatewayError: handle, HTTPException: handle, Exception: handle}


async def send(error: GatewayError, scope: Scope, send: Send, write: WriteError) -> None:
    """Send the response to an error outside of Litestar, whose handlers are not called there."""
    headers, problem = _from_gateway_error(context := context_of(scope), error)
    _note(context, problem)
    status, media_type, body = write(problem, scope)
    headers |= {"content-type": media_type, "content-length": str(len(body))}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def to_problem(error: Exception, request_id: str) -> Problem:
    """Describe the failure of one part of a request as if it were the whole request; log an unexpected exception."""
    if isinstance(error, GatewayError):
        return _problem(error.status, error.code, error.title, error.detail, request_id)
    LOG.error("unexpected exception", request_id=request_id, exc_info=error)
    detail = "the failure has been logged with this request_id"
    return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "Internal error", detail, request_id)


def _from_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> tuple[dict[str, str], Problem]:
    status = HTTPStatus(error.status_code)
    headers = dict(error.headers or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = with_head(headers.get("allow", ""))
        detail = _explain_method(request, headers["allow"])
    elif status == HTTPStatus.NOT_FOUND:
        detail = _explain_path(request)
    else:
        detail = status.description or status.phrase
    return headers, _problem(status, status.name.lower(), status.phrase, detail, context_of(request.scope).request_id)


def _explain_method(request: Request[Any, Any, Any], allow: str) -> str:
    """Say which methods a path supports, and how to send an image if it takes one; note its route."""
    handler = None
    with suppress(HTTPException):  # the route of this path for another method
        path, method = normalize_path(request.scope["path"]), "POST" if "POST" in allow else allow.partition(",")[0]
        _, handler, *_, template = request.app.asgi_router.handle_routing(path=path, method=method)
        note_route(request.scope, template)
    given = f"{request.method[:_MAX_METHOD]} is not supported here"
    if isinstance(handler, ModelRoute) and handler.key_in == "header":  # not of a dialect, which may need another form
        return f"{given}: send {_EXAMPLES[handler.takes]}; {_page_of(request)} describes it"
    return f"{given}, but {allow}; {_page_of(request)} describes what each path supports"


def _explain_path(request: Request[Any, Any, Any]) -> str:
    """Say that a path does not exist, and which one may be meant."""
    documented = [route.path for route in request.app.routes if isinstance(route, HTTPRoute) and _is_documented(route)]
    similar = suggestion(request.scope["path"], documented, _SIMILARITY)
    return f"this path does not exist{similar or ';'} {_page_of(request)} lists those that do"


def _page_of(request: Request[Any, Any, Any]) -> str:
    return SEARCH_DOCS if worker_of(request).deployment.is_beside else DOCS


def _is_documented(route: HTTPRoute) -> bool:
    return "{" not in route.path and any(handler.resolve_include_in_schema() for handler in route.route_handlers)


def _from_gateway_error(context: RequestContext, error: GatewayError) -> tuple[dict[str, str], Problem]:
    if context.timing.stages or isinstance(error, DeadlinePassed):  # a detection has begun
        context.failed_stage = context.timing.fail()
    if isinstance(error, GatewayFull):
        context.rejection_reason = error.reason
    if error.repeats_request:
        context.is_detail_logged = False
    elif error.__cause__ is not None and not isinstance(error, UnknownModel):  # Triton's text would repeat the request
        context.log_fields["cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"[:500]
    headers = {} if error.retry_after_seconds is None else {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    status = error.status
    if isinstance(error, ClientGone):  # if the client can still read the response, it sent a broken body
        context.is_client_gone = True
        status = HTTPStatus.BAD_REQUEST
    return headers, _problem(status, error.code, error.title, error.detail, context.request_id)


def with_head(allow: str) -> str:
    """Add HEAD to the methods of an `Allow` header that contains GET, and sort them."""
    return ", ".join(sorted(allow.replace("GET", "GET, HEAD").split(", ")))


def _note(context: RequestContext, problem: Problem) -> None:
    context.error = context.log_fields["code"] = problem.code
    if context.is_detail_logged:
        context.log_fields["detail"] = problem.detail


def _problem(status: int, code: str, title: str, detail: str, request_id: str) -> Problem:
    return Problem(f"urn:nereid:problem:{code}", title, status, detail, code, request_id)
