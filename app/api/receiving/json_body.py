"""JSON bodies, and base64 images in them."""

from binascii import a2b_base64
from contextlib import suppress
from typing import TypeVar

import msgspec

from app.api.receiving.content_type import JSON, body_type
from app.errors import MalformedRequest, UnsupportedMediaType

JSON_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""Errors that invalid JSON raises. ValueError: not UTF-8, or an integer with too many digits."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COUNTED_BYTES = 1 << 20
# Minimum bytes of JSON per escape. Some programs escape `/` and `+`, each 1/64 of the characters of base64.
_PER_ESCAPE = 16
_SPACES = b" \t\r\n"
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")

T = TypeVar("T")


def view_document(data: bytes) -> memoryview:
    """View JSON without the byte order mark that some programs add. Source: RFC 8259, 8.1.

    Raises:
        MalformedRequest: It has so many escapes that decoding it would block all threads for long.
    """
    escapes = 0
    for start in range(0, len(data), _COUNTED_BYTES) if len(data) > _COUNTED_BYTES else ():
        escapes += data.count(b"\\", start, start + _COUNTED_BYTES)
        if escapes > len(data) / _PER_ESCAPE:
            raise MalformedRequest("the JSON has too many escaped characters; base64 needs none but for line breaks")
    return memoryview(data)[len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0 :]


def decode_base64(encoded: str) -> bytes:
    """Decode base64 or a data URL; ignore white space, such as line breaks.

    The URL-safe alphabet without padding is also accepted. Source: RFC 4648, 5. At most two copies of the text are in memory, in
    addition to the text or the result.

    Raises:
        MalformedRequest: The text is not base64.
    """
    start = 0
    if encoded[:5].lower() == "data:":
        start = encoded.find(",") + 1 or len(encoded)
    with suppress(msgspec.ValidationError):
        return msgspec.convert(encoded[start:], bytes)
    try:
        text = bytearray(encoded, "ascii")
        del text[:start]
        text = text.translate(_STANDARD_ALPHABET, _SPACES)
        text += b"=" * (-len(text) % 4)
        return a2b_base64(text, strict_mode=True)
    except ValueError as error:  # not ASCII, or not base64
        raise MalformedRequest('"image" is not base64') from error


def decode(data: bytes, content_type: str, kind: type[T], example: str) -> T:
    """Decode JSON to a type.

    Args:
        data: The body.
        content_type: Its `Content-Type` header, JSON or curl's default, a form. Other types are rejected because their bodies are
            not parsed in a thread.
        kind: The type.
        example: A valid example, for error messages.

    Raises:
        UnsupportedMediaType: The header does not declare JSON.
        MalformedRequest: The body is not JSON of this type.
    """
    if body_type(content_type, data) != JSON:
        raise UnsupportedMediaType(f"send {JSON}, such as {example}")
    try:
        return msgspec.json.decode(view_document(data), type=kind)
    except JSON_ERRORS as error:
        raise MalformedRequest(f"expected a JSON object such as {example}") from error
