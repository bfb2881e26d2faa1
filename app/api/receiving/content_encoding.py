"""Decode the `Content-Encoding` of a request body."""

import zlib
from collections.abc import Callable, Iterator
from io import BytesIO

from app.api.receiving.client_watch import body_too_large
from app.errors import BodyTooLarge, MalformedRequest, UnsupportedMediaType

_PLAIN = ("", "identity")
_GZIP = ("gzip", "x-gzip")
_DEFLATE = "deflate"
# zlib's `wbits`: detect gzip or zlib by the first bytes; or raw deflate, which some clients send as `deflate`.
_ANY_CONTAINER, _NO_CONTAINER = 32 + zlib.MAX_WBITS, -zlib.MAX_WBITS
_ZLIB_METHOD, _ZLIB_CHECK = 8, 31
_INPUT_BYTES, _PIECE_BYTES = 1 << 16, 1 << 20
_GZIP_START = b"\x1f\x8b"
# Each member needs a decompressor. Blocked gzip has a member per 64 KiB, so the largest bodies stay below this limit.
_MAX_MEMBERS = 4096
# Encoded images and base64 hardly compress. A higher ratio indicates a decompression bomb.
_MAX_RATIO, _FREE_BYTES = 25, 1 << 20


def is_plain(content_encoding: str) -> bool:
    """Return whether a body with this `Content-Encoding` header is not encoded."""
    return content_encoding.strip().lower() in _PLAIN


def check(content_encoding: str) -> None:
    """Reject an unsupported `Content-Encoding`.

    Raises:
        UnsupportedMediaType: The coding is not supported.
    """
    if content_encoding.strip().lower() not in {*_PLAIN, *_GZIP, _DEFLATE}:
        raise UnsupportedMediaType(
            f"the Content-Encoding {content_encoding[:64]!r} is not supported; send the body as it is, or with gzip or deflate"
        )


def decode(data: bytes, content_encoding: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """Decode a body.

    Args:
        data: The body.
        content_encoding: Its `Content-Encoding` header, accepted by `check`.
        max_bytes: Maximum size of the result. Above 1 MiB the result is also limited to 25 times the size of the body.
        count: Called with the size of each piece of the result; may raise an error if memory is exhausted.

    Raises:
        BodyTooLarge: The result would exceed a limit.
        MalformedRequest: The body is truncated or corrupt, or has trailing data.
    """
    if is_plain(content_encoding):
        return data
    max_expanded = max(_FREE_BYTES, _MAX_RATIO * len(data))
    result = BytesIO()  # `getvalue` returns its buffer without a copy
    try:
        for piece in _decompress(memoryview(data)):
            count(len(piece))
            size = result.tell() + len(piece)
            if size > max_bytes:
                raise body_too_large(max_bytes)
            if size > max_expanded:
                raise BodyTooLarge(
                    f"the body becomes more than {_MAX_RATIO} times as large when it is decompressed; send it as it is"
                )
            result.write(piece)
    except zlib.error as error:
        raise MalformedRequest("the body is not compressed as its Content-Encoding says, or it is corrupt") from error
    return result.getvalue()


def _decompress(data: memoryview) -> Iterator[bytes]:
    """Yield pieces of at most `_PIECE_BYTES` of all gzip members or of the zlib stream. Source: RFC 1952, 2.2."""
    position = 0
    for _ in range(_MAX_MEMBERS):
        start = bytes(data[position : position + 2])
        decompressor = zlib.decompressobj(_NO_CONTAINER if _is_bare(start) else _ANY_CONTAINER)
        while not decompressor.eof:
            # The input is also cut into pieces: each call of zlib copies the unconsumed input.
            given = data[position : position + _INPUT_BYTES]
            piece = decompressor.decompress(given, _PIECE_BYTES)
            rest = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
            position += len(given) - len(rest)
            if not given and not piece and not decompressor.eof:
                raise MalformedRequest("the compressed body is truncated")
            yield piece
        if position == len(data):
            return
        if start != _GZIP_START or data[position : position + 2] != _GZIP_START:
            raise MalformedRequest("something follows the end of the compressed body")
    raise MalformedRequest(f"the compressed body has more than {_MAX_MEMBERS} members")


def _is_bare(start: bytes) -> bool:
    """Return whether compressed data with these first bytes has neither a zlib nor a gzip header. Source: RFC 1950, 2.2."""
    is_zlib = start[:1] and start[0] & 15 == _ZLIB_METHOD and not int.from_bytes(start) % _ZLIB_CHECK
    return not is_zlib and start != _GZIP_START
