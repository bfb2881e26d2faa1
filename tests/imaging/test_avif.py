"""AVIF: its header, and what the decoder gets of it."""

import struct
import tracemalloc
from itertools import product

import numpy as np
import pytest
from PIL import Image

from app.errors import InvalidImage, UnsupportedFormat
from app.imaging import avif
from app.imaging.decode import decode
from app.imaging.header import read_header
from tests.imaging.samples import MEGA, NOISE, PIXELS, encode, limits

AVIF = encode(Image.fromarray(PIXELS), "AVIF")


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L", 8 + len(content)) + kind + content


def with_properties(*extra: tuple[bytes, bytes]) -> bytes:
    """Write the sample again with additional properties."""
    header = avif.read_header(AVIF)
    plain = avif.rewrite(AVIF, header)
    frame = plain[plain.index(b"mdat") + 4 :]
    properties = box(b"ispe", struct.pack(">LLL", 0, header.width, header.height)) + box(b"av1C", header.configuration)
    properties += b"".join(box(*each) for each in extra)
    associations = struct.pack(">LLHB", 0, 1, 1, 2 + len(extra)) + bytes(range(1, 3 + len(extra)))
    start = plain[: plain.index(b"meta") - 4]
    old = plain[len(start) : plain.index(b"mdat") - 4]
    content = old[8 : old.index(b"iprp") - 4]
    content += box(b"iprp", box(b"ipco", properties) + box(b"ipma", associations))
    at = content.index(b"iloc") + 4 + 14
    offset = len(start) + 8 + len(content) + 8
    content = content[:at] + struct.pack(">L", offset) + content[at + 4 :]
    return start + box(b"meta", content) + box(b"mdat", frame)


def test_header_is_read() -> None:
    header = avif.read_header(AVIF)

    assert (header.width, header.height, header.orientation) == (32, 16, 1)
    assert len(header.configuration) == 4


def test_pixels_are_those_of_the_file() -> None:
    """The tolerance is the loss of the sample."""
    np.testing.assert_allclose(decode(read_header(AVIF, limits(MEGA)), (32, 16)).astype(int), PIXELS, atol=12)


def test_the_file_that_is_written_anew_is_the_same_image() -> None:
    written = avif.rewrite(AVIF, avif.read_header(AVIF))

    assert avif.rewrite(written, avif.read_header(written)) == written
    assert b"Exif" not in written


@pytest.mark.parametrize(("turns", "axis"), list(product(range(4), (None, 0, 1))))
def test_rotation_and_mirroring_are_applied(turns: int, axis: int | None) -> None:
    """First the rotation, anticlockwise, then the mirroring: axis 0 swaps top and bottom, axis 1 left and right.

    Source: ISO/IEC 23008-12, 6.5.10 and 6.5.12; MIAF has this order.
    """
    mirror = [] if axis is None else [(b"imir", bytes([axis]))]
    header = read_header(with_properties((b"irot", bytes([turns])), *mirror), limits(MEGA))

    pixels = decode(header, (32, 32))

    plain = decode(read_header(AVIF, limits(MEGA)), (32, 16))
    expected = np.rot90(plain, turns)
    if axis is not None:
        expected = expected[::-1] if axis == 0 else expected[:, ::-1]
    np.testing.assert_array_equal(pixels, expected)
    assert (header.height, header.width) == expected.shape[:2]


def in_pieces(extents: list[tuple[int, int]], fill: bytes = b"") -> bytes:
    """Write the sample again, with its frame in these extents, offset and size within it; the fill follows it."""
    plain = avif.rewrite(AVIF, avif.read_header(AVIF))
    start, frame = plain[: plain.index(b"meta") - 4], plain[plain.index(b"mdat") + 4 :] + fill
    old = plain[len(start) : plain.index(b"mdat") - 4]
    at, after = old.index(b"iloc") - 4, old.index(b"iinf") - 4

    def meta(offset: int) -> bytes:
        places = b"".join(struct.pack(">LL", offset + place, size) for place, size in extents)
        iloc = box(b"iloc", struct.pack(">LHHHHH", 0, 0x4400, 1, 1, 0, len(extents)) + places)
        return box(b"meta", old[8:at] + iloc + old[after:])

    return start + meta(len(start) + len(meta(0)) + 8) + box(b"mdat", frame)


def test_a_frame_may_be_in_pieces() -> None:
    """Pieces are joined in their order; a piece of size zero extends to the end of the file."""
    (_, size), *others = avif.read_header(AVIF).extents
    written = avif.rewrite(AVIF, avif.read_header(AVIF))

    assert not others
    for extents in ([(0, size)], [(0, 0)], [(0, 5), (5, size - 5)], [(0, 1), (1, 1), (2, size - 2)]):
        data = in_pieces(extents)
        assert avif.rewrite(data, avif.read_header(data)) == written


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ([(0, 0)] * 64, "empty or overlap"),
        ([(0, 9), (9, 0)], "empty or overlap"),
        ([(0, 800_000)] * 2, "empty or overlap"),
        ([(0, 1)] * 65, "too many pieces"),
        ([(0, 1_100_000)], "truncated"),
        ([(1_100_000, 0)], "truncated"),
        ([(0, 9), (1_100_000, 0)], "truncated"),
        ([], "not a single one"),
    ],
)
def test_pieces_that_are_larger_than_the_file_are_invalid(extents: list[tuple[int, int]], message: str) -> None:
    data = in_pieces(extents, bytes(1_000_000))
    tracemalloc.start()
    with pytest.raises(InvalidImage, match=message):
        avif.read_header(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


def test_the_frame_is_copied_once() -> None:
    """It is copied only into the rewritten file; its header is read in place."""
    padding = b"\x7a\x80\x80\x40" + bytes(1 << 20)  # a unit that decoders pass over, and its size in seven bits a byte
    data = in_pieces([(0, 0)], padding)
    tracemalloc.start()
    avif.rewrite(data, avif.read_header(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1.1 * len(data)


def test_tiles_are_told() -> None:
    with pytest.raises(UnsupportedFormat, match="composed of tiles"):
        avif.read_header(AVIF.replace(b"av01", b"grid"))


def test_a_size_that_is_not_the_frames_is_invalid() -> None:
    """A decoder would allocate the size in the frame."""
    at = AVIF.index(b"ispe") + 8
    for width, height in ((32, 15), (31, 16), (0, 0), (1 << 31, 1 << 31)):
        with pytest.raises(InvalidImage, match="another size"):
            avif.read_header(AVIF[:at] + struct.pack(">LL", width, height) + AVIF[at + 8 :])


def test_a_truncated_file_is_invalid() -> None:
    for length in range(16, len(AVIF), 3):
        with pytest.raises(InvalidImage):
            avif.read_header(AVIF[:length])


@pytest.mark.parametrize("boxes", [5, 5000])
def test_a_file_of_many_boxes_is_refused(boxes: int) -> None:
    """Each box costs some time."""
    data = AVIF[: AVIF.index(b"meta") - 4] + box(b"free", b"") * boxes
    with pytest.raises(InvalidImage, match="too many boxes" if boxes > 1000 else "no image"):
        avif.read_header(data)


def test_the_pixel_limit_is_checked_before_anything_is_decoded() -> None:
    """The limit is half of that of other formats."""
    data = encode(NOISE, "AVIF")

    assert read_header(data, limits(2 * 64 * 48)).width == 64
    with pytest.raises(Exception, match=r"64 x 48 pixels; the limit is"):
        read_header(data, limits(2 * 64 * 48 - 2))
