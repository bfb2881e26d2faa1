"""Compressed bodies: decoded as they are, within a limit."""

import gzip
import os
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.content_encoding import check, decode, is_plain
from app.errors import BodyTooLarge, GatewayError, GatewayFull, MalformedRequest, UnsupportedMediaType

MIB = 1 << 20


def bare(data: bytes) -> bytes:
    """Compress without a container."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def uncounted(_: int) -> None:
    """Have any memory."""


@pytest.mark.parametrize("plain", [b"", b"a", bytes(3 * MIB), os.urandom(200_000)], ids=["empty", "byte", "zeros", "noise"])
@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP ", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", bare),
        ("gzip", lambda data: zlib.compress(data, 0)),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_a_body_is_decoded(encoding: str, encode: object, plain: bytes) -> None:
    """As it was, also if the container is not the one that was declared; every byte is counted."""
    counted: list[int] = []

    assert callable(encode)
    assert decode(encode(plain), encoding, len(plain), counted.append) == plain
    assert sum(counted) == (0 if is_plain(encoding) else len(plain))


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x" * 1000])
def test_other_codings_are_rejected(encoding: str) -> None:
    """The error says which are supported, and repeats little."""
    with pytest.raises(UnsupportedMediaType, match=r"send the body as it is, or with gzip or deflate$") as caught:
        check(encoding)

    assert len(caught.value.detail) < 170


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "deflate", "identity", ""])
def test_codings_that_can_be_decoded_are_accepted(encoding: str) -> None:
    """In any case."""
    check(encoding)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress, bare])
def test_a_bomb_stops_at_the_limit(encode: object) -> None:
    """Little more than the limit is ever in memory."""
    assert callable(encode)
    data = encode(bytes(300 * MIB))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge, match="the limit is 2 MiB"):
        decode(data, "gzip", 2 * MIB, uncounted)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 6 * MIB


def test_memory_may_run_out() -> None:
    """The caller's own error stops it."""

    def refuse(_: int) -> None:
        raise GatewayFull("no memory")

    with pytest.raises(GatewayFull):
        decode(gzip.compress(b"a"), "gzip", MIB, refuse)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress, bare])
def test_a_truncated_body_is_malformed(encode: object) -> None:
    """Wherever it ends."""
    assert callable(encode)
    data = encode(os.urandom(300))
    for length in range(1, len(data)):
        with pytest.raises(MalformedRequest, match=r"truncated|corrupt"):
            decode(data[:length], "gzip", MIB, uncounted)


@pytest.mark.parametrize("size", [300, 65_525, 200_000])
@pytest.mark.parametrize("rest", [b"x", bytes(200_000), gzip.compress(b"more")], ids=["byte", "zeros", "member"])
def test_what_follows_the_end_is_malformed(size: int, rest: bytes) -> None:
    """Also where the pieces in which the body is read meet."""
    with pytest.raises(MalformedRequest, match=r"^something follows the end of the compressed body$"):
        decode(zlib.compress(bytes(range(250)) * (size // 250), 0) + rest, "deflate", MIB, uncounted)


@given(st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x78\x9c"]), st.binary())
def test_any_body_is_decoded_or_a_gateway_error(start: bytes, rest: bytes) -> None:
    """Whatever the bytes."""
    try:
        decoded = decode(start + rest, "gzip", MIB, uncounted)
    except GatewayError:
        return

    assert len(decoded) <= MIB
