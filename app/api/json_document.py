"""JSON before it is decoded."""

import msgspec

from app.errors import MalformedRequest

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
