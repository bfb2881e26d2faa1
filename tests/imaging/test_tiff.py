"""TIFF: the header, and the rewritten file for the decoder."""

import struct
import zlib
from io import BytesIO
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, InvalidImage, UnsupportedFormat
from app.imaging import tiff
from app.imaging.header import read_header
from tests.imaging.samples import MEGA, NOISE, PIXELS, limits, pixels_of, store, to_rgb

GREY = PIXELS[:, :, 0]
PALETTE = (*(n << 8 for n in range(256)), *((255 - n) << 8 for n in range(256)), *((n // 2) << 8 for n in range(256)))


def write(tags: dict[int, tuple[int, ...]], pixels: bytes, order: str = "<") -> bytes:
    """Write a TIFF of one strip by hand, with values of the type LONG."""
    tags = {273: (0,), 278: (1 << 16,), 279: (len(pixels),), **tags}
    behind = 8 + 2 + 12 * len(tags) + 4
    lengths = {tag: 4 * len(values) if len(values) > 1 else 0 for tag, values in tags.items()}
    tags = {tag: (behind + sum(lengths.values()),) if (tag, values) == (273, (0,)) else values for tag, values in tags.items()}
    entries = outside = b""
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}L", *values)
        entries += struct.pack(order + "HHL", tag, 4, len(values))
        entries += packed if len(values) == 1 else struct.pack(order + "L", behind + len(outside))
        outside += packed if len(values) > 1 else b""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "LH", 8, len(tags)) + entries + bytes(4) + outside + pixels


def tags_for(pixels: NDArray[Any], photometric: int, **others: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    samples = pixels.shape[2] if pixels.ndim == 3 else 1
    bits = (8 * pixels.itemsize,) * samples
    given = {int(name[1:]): value for name, value in others.items()}
    return {
        256: pixels.shape[1::-1][:1],
        257: pixels.shape[:1],
        258: bits,
        259: (1,),
        262: (photometric,),
        277: (samples,),
        **given,
    }


@pytest.mark.parametrize(("compression", "rows"), [(1, 5), (5, 1), (8, 5), (32773, 5), (32946, 5)])
def test_compressed_strips_are_decoded(compression: int, rows: int) -> None:
    options = [cv2.IMWRITE_TIFF_COMPRESSION, compression, cv2.IMWRITE_TIFF_ROWSPERSTRIP, rows]
    data = cv2.imencode(".tiff", PIXELS[:, :, ::-1], options)[1].tobytes()

    np.testing.assert_array_equal(pixels_of(data), PIXELS)


def test_deflate_may_lack_its_end_or_have_more_rows_than_are_needed() -> None:
    """More than a full strip would have is damage: it has no end in sight."""
    deflater = zlib.compressobj()
    endless = deflater.compress(PIXELS.tobytes()) + deflater.flush(zlib.Z_SYNC_FLUSH)
    for part in (endless, zlib.compress(PIXELS.tobytes() * 2)):
        np.testing.assert_array_equal(pixels_of(write(tags_for(PIXELS, 2, _259=(8,)), part)), PIXELS)
    with pytest.raises(InvalidImage):
        pixels_of(write(tags_for(PIXELS, 2, _259=(8,)), zlib.compress(PIXELS.tobytes() * 3)))


def old_lzw(data: bytes) -> bytes:
    """Compress as programs did before TIFF 5, with the lowest bits first, to codes of nine bits."""
    codes = [code for at in range(0, len(data), 200) for code in (256, *data[at : at + 200])]
    bits: int = sum(code << 9 * place for place, code in enumerate([*codes, 257]))
    return bits.to_bytes(9 * (len(codes) + 1) // 8 + 1, "little")


@pytest.mark.parametrize(("order", "alpha"), [("<", 0), (">", 1), (">", 2)])
def test_modes_are_decoded(order: str, alpha: int) -> None:
    with_alpha = np.dstack([PIXELS, np.full(GREY.shape, 60, np.uint8)])
    wide = (PIXELS.astype(np.uint16) * 257).astype(order + "u2")
    bits = np.packbits(GREY > 127, axis=1)
    extra = {"_338": (alpha,)}
    cases = [
        (tags_for(GREY, 1), GREY, to_rgb(GREY)),
        (tags_for(GREY, 0), GREY, to_rgb(255 - GREY)),
        (tags_for(np.dstack([GREY, GREY]), 1, **extra), np.dstack([GREY, GREY // 2]), to_rgb(GREY)),
        (tags_for(with_alpha, 2, **extra), with_alpha, PIXELS),
        (tags_for(wide, 2), wide, PIXELS),
        (tags_for(wide[:, :, 0], 1), wide[:, :, 0], to_rgb(GREY)),
        ({**tags_for(bits, 1), 256: (32,), 258: (1,)}, bits, to_rgb((GREY > 127) * 255)),
        (tags_for(GREY, 3, _320=PALETTE), GREY, np.stack([GREY, 255 - GREY, GREY // 2], axis=-1)),
    ]
    for number, (tags, stored, expected) in enumerate(cases):
        np.testing.assert_array_equal(pixels_of(write(tags, stored.tobytes(), order)), expected, err_msg=str(number))


def tiled(pixels: NDArray[Any], photometric: int, **others: tuple[int, ...]) -> bytes:
    height, width = pixels.shape[:2]
    padded = np.zeros((-(-height // 32) * 32, -(-width // 32) * 32, *pixels.shape[2:]), pixels.dtype)
    padded[:height, :width] = pixels
    places = [(y, x) for y in range(0, height, 32) for x in range(0, width, 32)]
    tiles = [padded[y : y + 32, x : x + 32].tobytes() for y, x in places]
    tags = tags_for(pixels, photometric, **{"_322": (32,), "_323": (32,), "_325": tuple(map(len, tiles)), **others})
    start = len(write({**tags, 324: (1,) * len(tiles)}, b""))
    return write({**tags, 324: tuple(start + number * len(tiles[0]) for number in range(len(tiles)))}, b"".join(tiles))


def test_tiles_are_decoded() -> None:
    pixels = np.asarray(NOISE)[:40, :50]

    np.testing.assert_array_equal(pixels_of(tiled(pixels, 2)), pixels)
    for side in (0, 16, 1024):
        with pytest.raises(GatewayError, match="sides of 32 to 512"):
            tiff.read_header(tiled(pixels, 2, _322=(side,)))
    deep = np.asarray(NOISE)[:40, :64, 0].astype(np.uint16) << 8
    np.testing.assert_array_equal(pixels_of(tiled(deep, 1)), to_rgb(deep >> 8))
    with pytest.raises(UnsupportedFormat, match="must fill its width"):  # OpenCV decodes it to wrong pixels
        tiff.read_header(tiled(deep[:, :50], 1))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_image_is_turned_upright(orientation: int) -> None:
    stored = store(PIXELS, orientation)
    for compression, data in ((1, stored.tobytes()), (5, old_lzw(stored.tobytes()))):
        file = write(tags_for(stored, 2, _274=(orientation,), _259=(compression,)), data)

        np.testing.assert_array_equal(pixels_of(file), PIXELS)


UNSUPPORTED: list[tuple[dict[int, tuple[int, ...]], str]] = [
    ({259: (7,)}, "compressed in a way"),
    ({262: (5,)}, "not grey, RGB or RGBA"),
    ({339: (3,)}, "not grey, RGB or RGBA"),
    ({284: (2,)}, "must be chunky"),
    ({254: (1,)}, "begins with a thumbnail, as raw photos"),
]
INVALID: list[tuple[dict[int, tuple[int, ...]], str]] = [
    ({256: (0,)}, "no pixels"),
    ({278: (4,)}, "strips or tiles, or not those"),
    ({278: (8,), 273: (8, 8), 279: (1500, 1500)}, "truncated, or its strips overlap"),
    ({279: (PIXELS.nbytes + 1,)}, "truncated, or its strips overlap"),
    ({279: (PIXELS.nbytes - 1,)}, "too short"),
    ({262: (3,), 258: (8,), 277: (1,), 320: (1,) * 767}, "palette"),
    *(({tag: (1,) * count}, f"tag {tag} has too many values") for tag, count in ((256, 2), (273, 20_001))),
]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        *(
            (write({**tags_for(PIXELS, 2), **tags}, PIXELS.tobytes()), error, message)
            for error, cases in ((UnsupportedFormat, UNSUPPORTED), (InvalidImage, INVALID))
            for tags, message in cases
        ),
        (b"II+\0" + bytes(100), UnsupportedFormat, "a BigTIFF; send a plain TIFF"),
        (b"II*\0\x08\0\0\0\xff\xff" + bytes(1_000_000), InvalidImage, "too many tags"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tiff_that_cannot_be_read_is_told(data: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_header(data, limits(MEGA))


def test_decoder_sees_no_tag_that_was_not_checked() -> None:
    file = BytesIO()
    Image.fromarray(PIXELS).save(file, "TIFF", description="canary", software="canary", dpi=(300, 300))
    written = tiff.rewrite(file.getvalue(), tiff.read_header(file.getvalue()))

    assert b"canary" not in written
    assert tiff.rewrite(written, tiff.read_header(written)) == written
    assert tiff.read_size(written) == (32, 16)
