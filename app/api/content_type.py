"""The content types of a detection request."""

from typing import Any

from litestar.connection import ASGIConnection

MULTIPART = "multipart/form-data"
JSON = "application/json"
_RAW = ("", "application/octet-stream")


def declared_type(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the declared content type in lower case, without its parameters; empty if there is none."""
    return connection.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_supported(content_type: str) -> bool:
    """Return whether a body of this type may contain an image. What it really is, its first bytes tell."""
    return content_type in (*_RAW, MULTIPART, JSON) or content_type.startswith("image/")
