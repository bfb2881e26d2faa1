"""Decode a body that can only be JSON."""

from typing import TypeVar

import msgspec

from app.api.content_type import JSON, body_type
from app.api.json_document import JSON_ERRORS, view_document
from app.errors import MalformedRequest, UnsupportedMediaType

T = TypeVar("T")


def decode(data: bytes, content_type: str, kind: type[T], example: str) -> T:
    """Decode JSON of a type.

    Args:
        data: The body.
        content_type: Its `Content-Type` header, which may be that of a form, as curl declares any body. JSON of another type would
            be decoded by the event loop, not by a thread.
        kind: The type.
        example: JSON as it should be.

    Raises:
        UnsupportedMediaType: The header does not say that it is JSON.
        MalformedRequest: It is not JSON of that type.
    """
    if body_type(content_type, data) != JSON:
        raise UnsupportedMediaType(f"send {JSON}, such as {example}")
    try:
        return msgspec.json.decode(view_document(data), type=kind)
    except JSON_ERRORS as error:
        raise MalformedRequest(f"expected a JSON object such as {example}") from error
