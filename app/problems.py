"""Errors -> problem+json, in one shape whoever raised them."""

from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from app.envelope import exchange
from app.errors import BodyTooLarge, ClientGone, GatewayError
from app.schema import Problem

MEDIA_TYPE = "application/problem+json"

LOG = structlog.get_logger()


def handlers(max_file_size_mb: float) -> ExceptionHandlersMap:
    """Map every exception to its problem."""

    def from_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
        if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return _from_gateway(request, BodyTooLarge(f"the limit is {max_file_size_mb:g} MB"))
        status = HTTPStatus(error.status_code)
        detail = _DETAILS.get(status, status.description or status.phrase)
        return _answer(request, status, (status.name.lower(), status.phrase, detail), dict(error.headers or {}))

    return {GatewayError: _from_gateway, HTTPException: from_http, Exception: _from_anything}


_DETAILS = {
    HTTPStatus.NOT_FOUND: "there is nothing at this path; /docs lists what there is",
    HTTPStatus.METHOD_NOT_ALLOWED: "this path does not take this method; /docs tells which it takes",
    HTTPStatus.BAD_REQUEST: "the request cannot be read",
}


def _from_gateway(request: Request[Any, Any, Any], error: GatewayError) -> Response[bytes]:
    if error.__cause__ is not None:
        exchange(request.scope).notes["cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"[:500]
    headers = {} if error.retry_after_seconds is None else {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, ClientGone):  # whoever still reads the answer has not hung up but sent a broken body
        exchange(request.scope).is_gone = True
        return _answer(request, HTTPStatus.BAD_REQUEST, (error.code, error.title, error.detail), headers)
    return _answer(request, error.status, (error.code, error.title, error.detail), headers)


def _from_anything(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    LOG.error("unexpected", request_id=exchange(request.scope).id, exc_info=error)
    text = "internal", "Something went wrong here", "the failure has been logged under this request_id"
    return _answer(request, HTTPStatus.INTERNAL_SERVER_ERROR, text, {})


def _answer(request: Request[Any, Any, Any], status: int, text: tuple[str, str, str], headers: dict[str, str]) -> Response[bytes]:
    """Send a problem; `text` is its code, title and detail."""
    code, title, detail = text
    this = exchange(request.scope)
    this.notes |= {"code": code, "detail": detail}
    problem = Problem(f"urn:nereid:problem:{code}", title, status, detail, code, this.id)
    return Response(msgspec.json.encode(problem), status_code=status, media_type=MEDIA_TYPE, headers=headers)
