"""Refuse by the headers alone, before the body is read."""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from app.errors import UnsupportedMediaType

AnyConnection = ASGIConnection[Any, Any, Any, Any]

MULTIPART = "multipart/form-data"
JSON = "application/json"
_RAW = ("", "application/octet-stream")


def media_type(connection: AnyConnection) -> str:
    """Read the declared content type, without its parameters, in lower case; empty where there is none."""
    return connection.headers.get("content-type", "").partition(";")[0].strip().lower()


async def require_picture(connection: AnyConnection, _: BaseRouteHandler) -> None:
    """Let pass what may hold a picture. What it really is, its first bytes tell later.

    A coroutine without a wait: Litestar would run a plain function in a thread.

    Raises:
        UnsupportedMediaType: The declared type is neither a picture nor an envelope we know.
    """
    declared = media_type(connection)
    if declared not in (*_RAW, MULTIPART, JSON) and not declared.startswith("image/"):
        raise UnsupportedMediaType(
            f"{declared[:64]!r} is not read; send image/*, application/octet-stream, multipart/form-data or application/json"
        )
