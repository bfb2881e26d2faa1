"""Compressed bodies: decoded as they are, within a limit."""

import gzip
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.receiving.content_encoding import check, decode, is_plain
from app.errors import BodyTooLarge, GatewayError, GatewayFull, MalformedRequest, UnsupportedMediaType

MIB = 1 << 20


def uncounted(_: int) -> None: ...


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Trace memory; yield a function that returns the peak in bytes."""
    tracemalloc.start()
    try:
        yield lambda: peak
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()


@pytest.mark.parametrize(
    "plain",
    [b"", b"a", bytes(MIB), os.urandom(3 * MIB // 2).hex().encode(), os.urandom(200_000)],
    ids=["empty", "byte", "zeros", "text", "noise"],
)
@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP ", gzip.compress),
        ("deflate", zlib.compress),
        ("gzip", lambda data: zlib.compress(data, 0)),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_a_body_is_decoded(encoding: str, encode: object, plain: bytes) -> None:
    counted: list[int] = []

    assert callable(encode)
    assert decode(encode(plain), encoding, len(plain), counted.append) == plain
    assert sum(counted) == (0 if is_plain(encoding) else len(plain))


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x" * 1000])
def test_other_codings_are_rejected(encoding: str) -> None:
    with pytest.raises(UnsupportedMediaType, match=r"send the body as it is, or with gzip or deflate$") as caught:
        check(encoding)

    assert len(caught.value.detail) < 170


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "deflate", "identity", ""])
def test_codings_that_can_be_decoded_are_accepted(encoding: str) -> None:
    check(encoding)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
def test_a_bomb_stops_at_the_limit(encode: object) -> None:
    assert callable(encode)
    counted: list[int] = []
    data = encode(bytes(100 * MIB))
    with traced() as peak, pytest.raises(BodyTooLarge, match="the limit is 2 MiB"):
        decode(data, "gzip", 2 * MIB, uncounted)
    with pytest.raises(BodyTooLarge, match=r"^the body becomes more than 25 times as large .*; send it as it is$"):
        decode(data, "gzip", 100 * MIB, counted.append)

    assert peak() < 6 * MIB
    assert sum(counted) <= max(25 * len(data), MIB) + MIB


@pytest.mark.parametrize(("times", "is_accepted"), [(20, True), (30, False)])
def test_a_body_may_expand_25_times(times: int, *, is_accepted: bool) -> None:
    """Noise does not shrink; zeros shrink a thousandfold."""
    noise = os.urandom(MIB // 10)
    plain = noise + bytes((times - 1) * len(noise))
    compressed = gzip.compress(plain)
    if is_accepted:
        assert decode(compressed, "gzip", len(plain), uncounted) == plain
    else:
        with pytest.raises(BodyTooLarge, match="25 times"):
            decode(compressed, "gzip", len(plain), uncounted)


def test_the_result_is_in_memory_once() -> None:
    plain = os.urandom(10 * MIB).hex().encode()
    data = gzip.compress(plain, 1)
    with traced() as peak:
        decoded = decode(data, "gzip", len(plain), uncounted)

    assert decoded == plain
    assert peak() < len(plain) * 9 / 8 + 3 * MIB


def test_memory_may_run_out() -> None:
    def refuse(_: int) -> None:
        raise GatewayFull("no memory")

    with pytest.raises(GatewayFull):
        decode(gzip.compress(b"a"), "gzip", MIB, refuse)


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
def test_a_truncated_body_is_malformed(encode: object) -> None:
    assert callable(encode)
    data = encode(os.urandom(300))
    for length in range(1, len(data)):
        with pytest.raises(MalformedRequest, match=r"truncated|corrupt"):
            decode(data[:length], "gzip", MIB, uncounted)


@pytest.mark.parametrize("size", [0, 300, 65_525, 200_000])
@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("rest", [b"x", b"\x1f", bytes(200_000), gzip.compress(b"more")], ids=["byte", "start", "zeros", "member"])
def test_bytes_after_the_end_of_a_compressed_body_are_malformed(encode: object, size: int, rest: bytes) -> None:
    assert callable(encode)
    with pytest.raises(MalformedRequest, match=r"^something follows the end of the compressed body$"):
        decode(encode(bytes(range(250)) * (size // 250), 0) + rest, "deflate", MIB, uncounted)


@given(st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x78\x9c"]), st.binary())
def test_any_body_is_decoded_or_a_gateway_error(start: bytes, rest: bytes) -> None:
    try:
        decoded = decode(start + rest, "gzip", MIB, uncounted)
    except GatewayError:
        return

    assert len(decoded) <= MIB
