"""The content types of a detection request."""

from litestar.types import Scope

MULTIPART = "multipart/form-data"
JSON = "application/json"
_RAW = ("", "application/octet-stream")


def content_type_header(scope: Scope) -> str:
    """Return the `Content-Type` header; empty if there is none."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"), "")


def media_type(header: str) -> str:
    """Return the type in a `Content-Type` header, in lower case and without its parameters."""
    return header.partition(";")[0].strip().lower()


def is_supported(media_type: str) -> bool:
    """Return whether a body of this type may contain an image. What it really is, its first bytes tell."""
    return media_type in (*_RAW, MULTIPART, JSON) or media_type.startswith("image/")
