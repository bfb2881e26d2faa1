"""Split a body of the type `application/x-www-form-urlencoded`.

curl declares this type for all data of `--data-binary`, so the body may also be the image itself.
"""

from collections.abc import Sequence
from urllib.parse import parse_qsl

from app.errors import MalformedRequest
from app.remote.address import is_address

_MAX_OTHER_BYTES = 1 << 16
# Characters that may be escaped in base64 or a data URL. A general unescape would build a list of all escapes.
_ESCAPED = b"+/=,:; \r\n"
# Other threads, such as the event loop, wait while a slice is searched and copied.
_SLICE_BYTES = 1 << 20
# Enough for `https://` with every character escaped.
_MAX_ADDRESS_START = 64
_JPEG_OR_PNG = (b"\xff\xd8\xff", b"\x89PNG")
_EXAMPLE = 'curl --data-binary @image.jpg -H "Content-Type: image/jpeg"'


def is_form(data: bytes) -> bool:
    """Return whether a body is a form; otherwise it is the image itself. A form is ASCII, which no image is.

    Raise MalformedRequest for an image corrupted by `curl --data`, which removes zeros and line breaks.
    """
    if data.isascii() and b"\0" not in data:
        return True
    if data.startswith(_JPEG_OR_PNG) and not any(byte in data for byte in b"\0\r\n"):
        raise MalformedRequest(f"the body has lost its zeros and line breaks, as `curl --data` does it; use {_EXAMPLE}")
    return False


def split(data: bytes, image_names: Sequence[str], max_fields: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a form: return the values of image fields, base64 that is not yet decoded, and name and value of each other field.

    A URL of an image is another field, `url`. Raise MalformedRequest for anything but a form, or too many fields or bytes.
    """
    parts = data.split(b"&", max_fields)
    if len(parts) > max_fields:
        raise MalformedRequest(f"the form has too many fields; the maximum is {max_fields}")
    if b"=" not in parts[0][:_MAX_OTHER_BYTES]:
        raise MalformedRequest(f"the body is neither an image nor a form; to send a file, use {_EXAMPLE}")
    names = [name.encode() for name in image_names]
    images = []
    others = []
    for part in parts:
        name, _, value = part.partition(b"=")
        if name in names and is_address(_unescape(value[:_MAX_ADDRESS_START]).decode()):
            others.append(b"url=" + value)
        elif name in names:
            images.append(_unescape(value).decode())
        else:
            others.append(part)
    rest = b"&".join(others)
    if len(rest) > _MAX_OTHER_BYTES:
        raise MalformedRequest(f"the form has more than {_MAX_OTHER_BYTES >> 10} KiB beside its image")
    return images, parse_qsl(rest.decode(), keep_blank_values=True)


def _unescape(value: bytes) -> bytes:
    """Unescape base64. `+` is kept, because some clients do not escape it and base64 contains no spaces."""
    if b"%" not in value:
        return value
    pieces = []
    start = 0
    while start < len(value):
        end = start + _SLICE_BYTES
        split_escape = value.rfind(b"%", end - 2, end)
        if split_escape != -1:
            end = split_escape
        piece = value[start:end]
        for byte in _ESCAPED:
            for escape in (b"%%%02X" % byte, b"%%%02x" % byte):
                piece = piece.replace(escape, bytes((byte,)))
        pieces.append(piece)
        start = end
    return b"".join(pieces)
