"""Refuse by the headers alone, before the body is read."""

from app.dependencies import AnyRequest
from app.errors import UnsupportedMediaType

MULTIPART = "multipart/form-data"
JSON = "application/json"
_RAW = ("", "application/octet-stream")


def media_type(request: AnyRequest) -> str:
    """Read the declared content type, without its parameters, in lower case; empty where there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def require_picture(request: AnyRequest) -> None:
    """Let pass what may hold a picture. What it really is, its first bytes tell later.

    For `before_request`: for Litestar's own guards, the whole handler is copied in every request.
    A coroutine without a wait, since a plain function would be run in a thread.

    Raises:
        UnsupportedMediaType: The declared type is neither a picture nor an envelope we know.
    """
    declared = media_type(request)
    if declared not in (*_RAW, MULTIPART, JSON) and not declared.startswith("image/"):
        raise UnsupportedMediaType(
            f"{declared[:64]!r} is not read; send image/*, application/octet-stream, multipart/form-data or application/json"
        )
