"""The size of an AV1 frame, in all forms of its header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidImage
from app.imaging.av1 import read_size

FRAME = b"\x32\x01\0"


def sequence_header(fields: str) -> bytes:
    """Write a unit from its bits, followed by a size of 300 x 200 in 9 and 8 bits."""
    bits = (fields + "1000" + "0111" + f"{299:09b}" + f"{199:08b}").replace(" ", "") + "1"
    content = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    return bytes((0x0A, len(content))) + content


PLAIN = sequence_header("000 1 1 00100")


@pytest.mark.parametrize(
    "fields",
    [
        "000 1 1 00100",
        "000 0 0 0 0 00000 000000000000 00100",
        "000 0 0 0 0 00000 000000000000 01000 1",
        "000 0 0 0 1 00001" + "000000000000 00100 1 1111" + "000000000000 01100 1 0",
        "000 0 0 1" + "0" * 64 + "0 0 0 00000 000000000000 00100",
        "000 0 0 1" + "0" * 64 + "1 00101 0 0 00000 000000000000 00100",
        "000 0 0 1" + "0" * 64 + "1 1 1" + "00011" + "0" * 42 + "0 00000 000000000000 00100 1 00001111 0",
        "000 0 0 1" + "0" * 64 + "1" + "0" * 32 + "0 0 00000 000000000000 00100",
    ],
    ids=["reduced", "full", "tier", "two points with delays", "timing", "equal intervals", "decoder model", "longest number"],
)
def test_size_is_read_from_any_sequence_header(fields: str) -> None:
    assert read_size(b"\x12\0" + sequence_header(fields) + FRAME) == (300, 200)


@pytest.mark.parametrize("data", [PLAIN, FRAME, PLAIN + FRAME + FRAME, PLAIN + PLAIN + FRAME, PLAIN + b"\x1a\x01\0" + FRAME, b""])
def test_more_or_less_than_one_frame_has_no_size(data: bytes) -> None:
    """Each frame would take as long to decode as the image itself."""
    assert read_size(data) == (0, 0)


def test_too_many_units_have_no_size() -> None:
    """A decoder looks at each unit."""
    assert read_size(PLAIN + b"\x12\0" * 100 + FRAME) == (300, 200)
    assert read_size(PLAIN + b"\x12\0" * 20_000 + FRAME) == (0, 0)


def test_the_last_unit_may_have_no_size_and_any_may_have_an_extension() -> None:
    """A last unit without a size extends to the end."""
    assert read_size(b"\x0e\0" + PLAIN[1:] + b"\x30" + bytes(9)) == (300, 200)


@pytest.mark.parametrize("data", [PLAIN[:-1], b"\x0a", b"\x0a\x80", b"\x0a" + b"\xff" * 9, b"\x04"])
def test_a_truncated_unit_is_invalid(data: bytes) -> None:
    with pytest.raises(InvalidImage, match="truncated"):
        read_size(data)


@given(st.sampled_from([b"", b"\x0a", b"\x0a\x0b", PLAIN]), st.binary())
def test_any_bytes_have_a_size_or_are_invalid(start: bytes, rest: bytes) -> None:
    try:
        width, height = read_size(start + rest)
    except InvalidImage:
        return
    assert 0 <= width <= 1 << 16
    assert 0 <= height <= 1 << 16
