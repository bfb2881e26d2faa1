"""Decode the `Content-Encoding` of a request body."""

import zlib
from collections.abc import Callable, Iterator
from io import BytesIO

from app.api.receiving.client_watch import body_too_large
from app.errors import BodyTooLarge, MalformedRequest, UnsupportedMediaType

_PLAIN = ("", "identity")
_CODED = ("gzip", "x-gzip", "deflate")
_ANY_CONTAINER = 32 + zlib.MAX_WBITS  # zlib's `wbits`: detect gzip or zlib by the first bytes
_INPUT_BYTES, _PIECE_BYTES = 1 << 16, 1 << 20
# Encoded images and base64 hardly compress. A higher ratio indicates a decompression bomb.
_MAX_RATIO, _FREE_BYTES = 25, 1 << 20


def is_plain(content_encoding: str) -> bool:
    """Return whether a body with this `Content-Encoding` header is not encoded."""
    return content_encoding.strip().lower() in _PLAIN


def check(content_encoding: str) -> None:
    """Raise UnsupportedMediaType for an unsupported `Content-Encoding`."""
    if content_encoding.strip().lower() not in {*_PLAIN, *_CODED}:
        raise UnsupportedMediaType(
            f"the Content-Encoding {content_encoding[:64]!r} is not supported; send the body as it is, or with gzip or deflate"
        )


def decode(data: bytes, content_encoding: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """Decode a body whose `Content-Encoding` header `check` has accepted, to at most 25 times its size above 1 MiB.

    `count` gets the size of each piece, and may raise an error. Raise BodyTooLarge, or MalformedRequest for a corrupt body.
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
    decompressor = zlib.decompressobj(_ANY_CONTAINER)
    position = 0
    while not decompressor.eof:
        # The input is also cut into pieces: each call of zlib copies the unconsumed input.
        given = data[position : position + _INPUT_BYTES]
        piece = decompressor.decompress(given, _PIECE_BYTES)
        position += len(given) - len(decompressor.unconsumed_tail)
        if not given and not piece and not decompressor.eof:
            raise MalformedRequest("the compressed body is truncated")
        yield piece
    if decompressor.unused_data or position < len(data):
        raise MalformedRequest("something follows the end of the compressed body")
