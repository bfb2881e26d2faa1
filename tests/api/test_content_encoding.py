"""Compressed bodies: decoded as they are, within a limit."""

import gzip
import os
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.receiving.content_encoding import check, decode, is_plain
from app.errors import BodyTooLarge, GatewayError, GatewayFull, MalformedRequest, UnsupportedMediaType
from tests.api.conftest import peak_below

MIB = 1 << 20

Encode = Callable[[bytes], bytes]


def uncounted(_: int) -> None: ...


def test_body_is_decoded() -> None:
    for encoding, encode in (("X-GZIP ", gzip.compress), ("deflate", zlib.compress), ("gzip", zlib.compress), ("identity", bytes)):
        check(encoding)
        for plain in (b"", bytes(MIB), os.urandom(3 * MIB // 2).hex().encode(), os.urandom(200_000)):
            counted: list[int] = []
            assert decode(encode(plain), encoding, len(plain), counted.append) == plain
            assert sum(counted) == (0 if is_plain(encoding) else len(plain))
    for encoding in ("br", "gzip, gzip"):
        with pytest.raises(UnsupportedMediaType, match=r"send the body as it is, or with gzip or deflate$"):
            check(encoding)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
def test_bomb_stops_at_the_limit(encode: Encode) -> None:
    """A body may expand 25 times: noise does not shrink; zeros shrink a thousandfold."""
    counted: list[int] = []
    data = encode(bytes(100 * MIB))
    with peak_below(6 * MIB):
        with pytest.raises(BodyTooLarge, match="the limit is 2 MiB"):
            decode(data, "gzip", 2 * MIB, uncounted)
        with pytest.raises(BodyTooLarge, match=r"^the body becomes more than 25 times as large .*; send it as it is$"):
            decode(data, "gzip", 100 * MIB, counted.append)
    assert sum(counted) <= max(25 * len(data), MIB) + MIB

    noise = os.urandom(MIB // 10)
    plain = noise + bytes(19 * len(noise))
    assert decode(encode(plain), "gzip", len(plain), uncounted) == plain
    with pytest.raises(BodyTooLarge, match="25 times"):
        decode(encode(plain + bytes(10 * len(noise))), "gzip", 2 * len(plain), uncounted)


def test_result_is_in_memory_once_and_counted() -> None:
    def refuse(_: int) -> None:
        raise GatewayFull("no memory")

    plain = os.urandom(10 * MIB).hex().encode()
    data = gzip.compress(plain, 1)
    with peak_below(len(plain) * 9 / 8 + 3 * MIB):
        assert len(decode(data, "gzip", len(plain), uncounted)) == len(plain)
    with pytest.raises(GatewayFull):
        decode(data, "gzip", len(plain), refuse)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
def test_truncated_or_continued_body_is_malformed(encode: Encode) -> None:
    data = encode(os.urandom(300))
    for length in [1, 2, *range(3, len(data), 40), len(data) - 1]:
        with pytest.raises(MalformedRequest, match=r"truncated|corrupt"):
            decode(data[:length], "gzip", MIB, uncounted)
    large = encode(os.urandom(200_000))
    whole = zlib.compress(bytes(65_525), 0)  # ends where the input is cut
    for continued in (data + b"x", encode(b"") + b"\x1f", whole + b"x", large + bytes(200_000), large + gzip.compress(b"more")):
        with pytest.raises(MalformedRequest, match=r"^something follows the end of the compressed body$"):
            decode(continued, "deflate", MIB, uncounted)


@given(st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x78\x9c"]), st.binary())
def test_any_body_is_decoded_or_a_gateway_error(start: bytes, rest: bytes) -> None:
    try:
        decoded = decode(start + rest, "gzip", MIB, uncounted)
    except GatewayError:
        return

    assert len(decoded) <= MIB
