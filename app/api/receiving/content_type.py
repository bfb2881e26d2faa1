"""The content types of a detection request."""

import re
from functools import lru_cache

from app.errors import MalformedRequest

MULTIPART = "multipart/form-data"
JSON = "application/json"
URLENCODED = "application/x-www-form-urlencoded"
"""The type of a form; also curl's default for any data."""
_OPTION = re.compile(r';\s*([\w-]+)\s*=\s*(?:"((?:\\.|[^"\\])*+)"|([^\s;"]*))', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")


@lru_cache(64)  # asked several times per request
def media_type(content_type: str) -> str:
    """Return the type in a `Content-Type` header, in lower case and without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def body_type(content_type: str, data: bytes) -> str:
    """Return the media type of a body: the declared one, but JSON for an object that curl declares as a form."""
    declared = media_type(content_type)
    return JSON if declared == URLENCODED and data[:64].lstrip().startswith(b"{") else declared


def boundary_of(content_type: str) -> str:
    """Return the boundary of a form; also one with characters that should be quoted and are not, as several programs send it.

    Raise MalformedRequest for two: a proxy might have seen another form.
    """
    options = _OPTION.findall(content_type)
    boundaries = [_ESCAPE.sub(r"\1", quoted) or plain for name, quoted, plain in options if name.lower() == "boundary"]
    if len(boundaries) > 1:
        raise MalformedRequest("the Content-Type header has more than one boundary")
    return boundaries[0] if boundaries else ""
