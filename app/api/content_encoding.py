"""Undo the `Content-Encoding` of a request body."""

import zlib
from collections.abc import Callable, Iterator

from app.api.client_watch import body_too_large
from app.errors import MalformedRequest, UnsupportedMediaType

_PLAIN = ("", "identity")
_GZIP = ("gzip", "x-gzip")
_DEFLATE = "deflate"
# zlib's codes of the container: either gzip or zlib, by its first bytes; and none, which some clients call `deflate`, too.
_ANY_CONTAINER, _NO_CONTAINER = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD, _ZLIB_CHECK = 8, 31
_INPUT_BYTES, _PIECE_BYTES = 1 << 16, 1 << 20


def is_plain(content_encoding: str) -> bool:
    """Return whether a body with this `Content-Encoding` header is as it was before it was sent."""
    return content_encoding.strip().lower() in _PLAIN


def check(content_encoding: str) -> None:
    """Reject a body that cannot be decoded.

    Raises:
        UnsupportedMediaType: The coding is not supported.
    """
    if content_encoding.strip().lower() not in {*_PLAIN, *_GZIP, _DEFLATE}:
        raise UnsupportedMediaType(
            f"the Content-Encoding {content_encoding[:64]!r} is not supported; send the body as it is, or with gzip or deflate"
        )


def decode(data: bytes, content_encoding: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """Decompress a body.

    Args:
        data: The body.
        content_encoding: Its `Content-Encoding` header, which `check` has accepted.
        max_bytes: Maximum size of the result.
        count: Called with the size of each piece of the result; raises what the caller wants to be raised if there is no
            memory for it.

    Raises:
        BodyTooLarge: The result would be larger than allowed.
        MalformedRequest: The body is truncated or corrupt, or something follows it.
    """
    if is_plain(content_encoding):
        return data
    decompressor = zlib.decompressobj(_NO_CONTAINER if _is_bare(data) else _ANY_CONTAINER)
    pieces = []
    size = 0
    try:
        for piece in _decompress(decompressor, memoryview(data)):
            count(len(piece))
            size += len(piece)
            if size > max_bytes:
                raise body_too_large(max_bytes)
            pieces.append(piece)
    except zlib.error as error:
        raise MalformedRequest("the body is not compressed as its Content-Encoding says, or it is corrupt") from error
    if not decompressor.eof:
        raise MalformedRequest("the compressed body is truncated")
    if decompressor.unused_data:
        raise MalformedRequest("something follows the end of the compressed body")
    return b"".join(pieces)


def _decompress(decompressor: "zlib._Decompress", data: memoryview) -> Iterator[bytes]:
    """Yield pieces of at most `_PIECE_BYTES`. The input is cut, too: zlib copies what it has not consumed, each time."""
    for start in range(0, len(data), _INPUT_BYTES):
        rest: memoryview | bytes = data[start : start + _INPUT_BYTES]
        while rest and not decompressor.eof:
            yield decompressor.decompress(rest, _PIECE_BYTES)
            rest = decompressor.unconsumed_tail
        if decompressor.eof and not decompressor.unused_data:
            decompressor.decompress(data[start + _INPUT_BYTES :][:1])  # becomes `unused_data`
        if decompressor.eof:
            return
    yield decompressor.decompress(b"", _PIECE_BYTES)  # what was left when a piece was full


def _is_bare(data: bytes) -> bool:
    """Return whether compressed data is in neither a zlib nor a gzip container. Source: RFC 1950, 2.2; RFC 1952, 2.3.1."""
    is_zlib = data[:1] and data[0] & 15 == _ZLIB_METHOD and not int.from_bytes(data[:2]) % _ZLIB_CHECK
    return not is_zlib and not data.startswith(b"\x1f\x8b")
