"""Decode images that are sent as base64."""

from binascii import a2b_base64
from contextlib import suppress

import msgspec

from app.errors import MalformedRequest

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
