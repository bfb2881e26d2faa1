"""Damaged files of every format: one that is not wholly there is refused, and no other is left blank from there.

PNG and Deflate have checksums, and the decoder of AVIF notices what does not end where it should: all damage is found. In the other
formats, changed bytes may be another picture of the same size. LZW and PackBits then have another length, more often than not.
"""

from io import BytesIO
from random import Random
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from PIL import Image

from app.errors import InvalidImage
from app.imaging import tiff
from app.imaging.decode import decode
from app.imaging.header import read_header
from tests.imaging.samples import HEIC, MEGA, encode, limits, pixels_of
from tests.support import sample_image

CAT = Image.open(BytesIO(sample_image("chelsea.jpg"))).convert("RGB").resize((150, 100))
END_BYTES = 20
"""At the end of a file, marks of the end and padding: an image may be whole without them."""


class Format(NamedTuple):
    """A file, and the least percentages of those with each kind of damage that are refused."""

    whole: bytes
    cut: int = 100
    gap: int = 100
    zeroed: int = 0
    flipped: int = 0
    times: int = 50
    """How many are damaged; less where each takes a process."""
    zeros_are_pixels: bool = False
    """Whether zeros may be pixels of one colour."""


def encode_jpeg(mode: str, *, progressive: bool = False) -> bytes:
    return encode(CAT.convert(mode), "JPEG", progressive=progressive, subsampling=-1)


def encode_tiff(compression: int) -> bytes:
    """Encode a TIFF of several strips, whose directory precedes them."""
    options = [cv2.IMWRITE_TIFF_COMPRESSION, compression, cv2.IMWRITE_TIFF_ROWSPERSTRIP, 16]
    data = cv2.imencode(".tiff", np.asarray(CAT)[:, :, ::-1], options)[1].tobytes()
    return tiff.rewrite(data, tiff.read_header(data))


FILES = {
    "JPEG": Format(encode_jpeg("RGB"), zeroed=20),
    "JPEG, progressive": Format(encode_jpeg("RGB", progressive=True), gap=90, zeroed=20),  # it may end between two scans
    "JPEG, CMYK": Format(encode_jpeg("CMYK"), zeroed=20),
    "PNG": Format(encode(CAT, "PNG"), zeroed=100, flipped=100),
    "WebP, lossless": Format(encode(CAT, "WEBP")),
    "GIF": Format(encode(CAT, "GIF"), gap=90, zeroed=90),
    "BMP": Format(encode(CAT, "BMP"), zeros_are_pixels=True),
    "TIFF": Format(encode_tiff(1), zeros_are_pixels=True),
    "TIFF, Deflate": Format(encode_tiff(8), zeroed=100, flipped=100),
    "TIFF, LZW": Format(encode_tiff(5), zeroed=90, times=10),
    "AVIF": Format(encode(CAT, "AVIF"), zeroed=100, flipped=100, times=10),
    "HEIC": Format(HEIC, times=10),
}


def damaged(data: bytes, damage: str, random: Random) -> bytes:
    if damage == "cut":
        return data[: random.randrange(40, len(data) - END_BYTES)]
    # Half of the pixels precede, not the boxes of an AVIF or HEIC.
    at = random.randrange(max(len(data) // 2, data.find(b"mdat") + 8), len(data) - END_BYTES)
    if damage == "gap":
        return data[:at] + data[-END_BYTES // 2 :]
    if damage == "zeroed":
        length = len(data[at : at + random.choice([16, 300, 2000])])
        return data[:at] + bytes(length) + data[at + length :]
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "gap", "zeroed", "flipped"])
def test_damaged_file_is_refused_as_far_as_its_damage_is_seen(name: str, damage: str) -> None:
    tested = FILES[name]
    shape = pixels_of(tested.whole).shape
    random = Random(29)  # noqa: S311 - not a secret
    refused = 0
    for _ in range(tested.times):
        data = damaged(tested.whole, damage, random)
        if name == "JPEG" and len(data) > len(tested.whole) // 2:
            assert decode(read_header(data, limits(MEGA)), (1, 1), allows_truncated=True).size
        try:
            pixels = pixels_of(data)
        except InvalidImage:
            refused += 1
            continue
        assert pixels.shape == shape
        assert tested.zeros_are_pixels or np.ptp(pixels[-1])
    assert refused * 100 >= tested.times * getattr(tested, damage)
