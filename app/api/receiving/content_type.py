"""The content types of a detection request."""

from functools import lru_cache

MULTIPART = "multipart/form-data"
JSON = "application/json"
URLENCODED = "application/x-www-form-urlencoded"
"""The type of a form; also curl's default for any data."""


@lru_cache(64)  # asked several times per request
def media_type(content_type: str) -> str:
    """Return the type in a `Content-Type` header, in lower case and without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def body_type(content_type: str, data: bytes) -> str:
    """Return the media type of a body: the declared one, but JSON for an object that curl declares as a form."""
    declared = media_type(content_type)
    return JSON if declared == URLENCODED and data[:64].lstrip().startswith(b"{") else declared


def is_supported(media_type: str) -> bool:
    """Return whether a body of this type may contain an image. The image format is detected later, from its first bytes."""
    return media_type in ("", "application/octet-stream", MULTIPART, JSON, URLENCODED) or media_type.startswith("image/")
