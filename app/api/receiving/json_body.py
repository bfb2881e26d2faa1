"""Bodies that are JSON, and images in them as base64."""

from binascii import a2b_base64
from contextlib import suppress
from typing import TypeVar

import msgspec

from app.api.receiving.content_type import JSON, body_type
from app.errors import MalformedRequest, UnsupportedMediaType

JSON_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""What JSON leads to that is not as it should be. ValueError: not UTF-8, or an integer of many digits."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COUNTED_BYTES = 1 << 20
# Bytes of JSON for each escaped character. Some programs escape `/`, and `+`, each of which is every 64th character of base64.
_PER_ESCAPE = 16


def view_document(data: bytes) -> memoryview:
    """View JSON without the byte order mark that some programs write in front of it. Source: RFC 8259, 8.1.

    Raises:
        MalformedRequest: It consists of escaped characters to such a part that no other thread would run while it is decoded.
    """
    escapes = 0
    for start in range(0, len(data), _COUNTED_BYTES) if len(data) > _COUNTED_BYTES else ():
        escapes += data.count(b"\\", start, start + _COUNTED_BYTES)
        if escapes > len(data) / _PER_ESCAPE:
            raise MalformedRequest("the JSON has too many escaped characters; base64 needs none but for line breaks")
    return memoryview(data)[len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0 :]


_SPACES = b" \t\r\n"
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")


def decode_base64(encoded: str) -> bytes:
    """Decode base64 or a data URL; white space, in which long lines are often broken, does not count.

    The alphabet of URLs, which needs no padding, is read as well. Source: RFC 4648, 5. Never more than two copies of the text are
    in memory, beside it or the result.

    Raises:
        MalformedRequest: It is neither.
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
    except ValueError as error:  # it is not ASCII, or not base64
        raise MalformedRequest('"image" is not base64') from error


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
