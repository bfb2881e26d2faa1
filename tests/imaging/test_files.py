"""JPEG, TIFF, and files of cameras and programs: what is unusual is read as others read it, what is malicious is rejected."""

import struct
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, InvalidImage, UnsupportedFormat
from app.imaging import jpeg, tiff
from app.imaging.header import read_header
from tests.imaging.samples import AVIF, HEIC, MEGA, NOISE, PIXELS, encode, exif_of, limits, pixels_of, png_chunk, store, to_rgb
from tests.support import SHARED

EXIF = exif_of(6).tobytes()
BLANK = Image.new("RGB", (64, 48))
USUAL = {"quality": 75, "subsampling": "4:2:0"}
BASELINE, PROGRESSIVE, WITH_EXIF = (
    encode(BLANK, "JPEG", **USUAL, **options) for options in ({}, {"progressive": True}, {"exif": EXIF})
)
FRAME = b"\xff\xc0\x00\x11\x08"
SCANS = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\0\0\0\0" * 200


@pytest.mark.parametrize(
    ("marker", "depth", "kind"),
    [(0xC1, 12, "12-bit"), (0xC3, 16, "lossless"), (0xC5, 8, "hierarchical"), (0xF7, 8, "JPEG-LS")],
)
def test_kind_that_cannot_be_decoded_is_told(marker: int, depth: int, kind: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"^the image is a {kind} JPEG; send a baseline or progressive one of 8 bits"):
        jpeg.read_header(BASELINE.replace(FRAME, bytes((0xFF, marker, 0, 0x11, depth))))


@pytest.mark.parametrize("between", [b"\xff" * 9, b"\xff\xd0", b"junk", b"\xff\xe2\0\0", b"\xff\xfe\0\x06text"])
def test_exif_is_found_behind_what_decoders_skip(between: bytes) -> None:
    """Other segments, fill bytes, markers without a length or with an invalid one, and junk are skipped as in libjpeg."""
    header = jpeg.read_header(WITH_EXIF[:2] + between + WITH_EXIF[2:])
    assert header == (EXIF.removeprefix(b"Exif\0\0"), 1, True, (64, 48))


def test_file_of_one_scan_is_told_from_those_of_several_whatever_is_behind_the_image() -> None:
    """With several scans, libjpeg keeps all coefficients, even if the file is truncated after the first scan."""
    first, anything = PROGRESSIVE.index(b"\xff\xda"), np.random.default_rng(0).bytes(1_000_000) + SCANS

    assert jpeg.read_header(BASELINE)[1:] == (1, True, (64, 48))
    assert jpeg.read_header(PROGRESSIVE[: first + 30])[1:3] == (1, False)
    assert jpeg.read_header(PROGRESSIVE + anything) == jpeg.read_header(PROGRESSIVE)
    assert jpeg.read_header(BASELINE[:-2] + anything).scans == 1


@pytest.mark.parametrize(
    ("flood", "some", "many"),
    [(b"\x01", 1000, 300_000), (b"\xff\xe5\x00\x02", 1000, 3000), (b"\xff\xd0", 1000, 3000)],
    ids=["junk", "segments", "markers"],
)
def test_jpeg_that_is_mostly_header_is_refused(flood: bytes, some: int, many: int) -> None:
    assert jpeg.read_header(WITH_EXIF[:2] + flood * some + WITH_EXIF[2:]).exif
    for rest in (WITH_EXIF[2:], b""):
        with pytest.raises(InvalidImage, match="too many"):
            jpeg.read_header(WITH_EXIF[:2] + flood * many + rest)


def test_too_many_scans_are_refused_also_behind_a_marker_without_a_length() -> None:
    """Each scan visits every pixel; the scans of a usual progressive JPEG are accepted."""
    assert 5 < jpeg.read_header(PROGRESSIVE).scans < 20
    scans = PROGRESSIVE[2:-2] + SCANS
    length = (len(scans) + 2).to_bytes(2)
    for hidden in (scans, *(marker + length + scans for marker in (b"\xff\xd0", b"\xff\xd8", b"\xff\xff"))):
        with pytest.raises(InvalidImage, match="too many"):
            jpeg.read_header(b"\xff\xd8" + hidden + BASELINE[2:])


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
    file = encode(Image.fromarray(PIXELS), "TIFF", description="canary", software="canary", dpi=(300, 300))
    assert b"canary" in file
    assert b"canary" not in tiff.rewrite(file, tiff.read_header(file))


BLOCKS = Image.fromarray(PIXELS)
JPEG, PNG, BMP = (encode(BLOCKS, name) for name in ("JPEG", "PNG", "BMP"))
IN_SCANS = encode(BLOCKS, "JPEG", progressive=True)
TABLE = JPEG.index(b"\xff\xdb")
SECOND_SCAN = IN_SCANS.index(b"\xff\xc4", IN_SCANS.index(b"\xff\xda"))
PROFILE = b"\xff\xe2\0\x14ICC_PROFILE\0\1\1abcd"


def meta_at_the_end(data: bytes) -> bytes:
    """Put the description of `AVIF` or `HEIC` behind the pixels, as phones do."""
    meta, pixels = data.index(b"meta") - 4, data.index(b"mdat") - 4
    offset = pixels - 2  # of the data by `iloc`, which counts from there
    described = data[meta:pixels].replace(offset.to_bytes(4), (offset - (pixels - meta)).to_bytes(4))
    return data[:meta] + data[pixels:] + described


def red_first(data: bytes) -> bytes:
    """Store the pixels of a BMP as 32 bits with red in the low byte, without a mask for alpha."""
    pixels = np.dstack([PIXELS[::-1], np.zeros(PIXELS.shape[:2], np.uint8)]).tobytes()
    header = struct.pack("<LiiHHL", 40, 32, 16, 1, 32, 3) + data[34:54] + struct.pack("<3L", 0xFF, 0xFF00, 0xFF0000)
    return data[:10] + struct.pack("<L", 14 + len(header)) + header + pixels


def short_palette() -> bytes:
    """Encode a TIFF by LZW whose palette has colours of 8 bits."""
    file = encode(BLOCKS.quantize(24, dither=Image.Dither.NONE), "TIFF", compression="raw")
    (at,) = struct.unpack_from("<L", file, file.index(struct.pack("<HHL", 320, 3, 768)) + 8)
    return file[:at] + (np.frombuffer(file, "<u2", 768, at) >> 8).astype("<u2").tobytes() + file[at + 1536 :]


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        (JPEG[:TABLE] + b"\x42" + JPEG[TABLE:], 3),
        (JPEG[:2] + b"\xff\xfe\0\x04" + b"comment of a camera" + JPEG[2:], 3),
        (JPEG[:2] + 2 * PROFILE + JPEG[2:], 3),
        (JPEG[:2] + b"\xff\xe2\0\x0eICC_PROFILE\0" + JPEG[2:], 3),
        (JPEG[:-2] + b"dhavcam\0", 3),
        (JPEG[:-2] + b"dhavcam\0" + JPEG[-2:], 3),
        (PNG[:33] + png_chunk(b"pHYs", struct.pack(">LLB", 1, 1, 0))[:-1] + b"?" + PNG[33:], 0),
        (PNG[:33] + png_chunk(b"pHYs", b"\0\1") + PNG[33:], 0),
        (PNG[:33] + png_chunk(b"tEXt", b"exif:Make\0camera") * 120 + PNG[33:], 0),
        (red_first(BMP), 0),
        (short_palette(), 1),
        (meta_at_the_end(AVIF), 3),
        (meta_at_the_end(HEIC), 3),
    ],
    ids=[
        "JPEG, byte between segments", "JPEG, short length", "JPEG, profile twice", "JPEG, empty profile", "JPEG, padding, no end",
        "JPEG, padding", "PNG, checksum", "PNG, length", "PNG, many texts", "BMP, red first", "TIFF, palette of 8 bits",
        "AVIF, meta at the end", "HEIC, meta at the end",
    ],
)  # fmt: skip
def test_pixels_are_those_of_the_usual_file(data: bytes, tolerance: int) -> None:
    np.testing.assert_allclose(pixels_of(data).astype(int), PIXELS, atol=tolerance)


def test_cut_file_is_refused_whatever_stands_before_its_pixels() -> None:
    restarts = encode(BLOCKS, "JPEG", restart_marker_blocks=2)
    hole = restarts.index(b"\xff\xd1")
    for cut in (
        JPEG[:2] + 2 * PROFILE + JPEG[2:-20],
        IN_SCANS[:SECOND_SCAN] + b"junk" + IN_SCANS[SECOND_SCAN:],
        restarts[:hole] + bytes(40) + restarts[hole:],
    ):
        with pytest.raises(InvalidImage, match="truncated or corrupt"):
            pixels_of(cut)


@pytest.mark.parametrize("channels", [1, 4])
def test_avif_with_alpha_or_without_colours_becomes_rgb(channels: int) -> None:
    pixels = np.dstack([PIXELS[:, :, ::-1], np.full(PIXELS.shape[:2], 90, np.uint8)]) if channels == 4 else PIXELS[:, :, 0]
    data = cv2.imencode(".avif", pixels, [cv2.IMWRITE_AVIF_QUALITY, 100])[1].tobytes()
    expected: NDArray[np.uint8] = PIXELS if channels == 4 else np.dstack([PIXELS[:, :, 0]] * 3)
    np.testing.assert_allclose(pixels_of(data).astype(int), expected, atol=4)

    if channels == 1:  # the same values between 16 and 235
        nclx = data.index(b"nclx") + 10
        limited = data[:nclx] + bytes([data[nclx] & 0x7F]) + data[nclx + 1 :]
        wider = np.clip((expected.astype(int) - 16) * 255 / 219, 0, 255)
        np.testing.assert_allclose(pixels_of(limited), wider, atol=6)


COLOURS = {"R": (220, 40, 40), "G": (40, 180, 60), "B": (40, 60, 220), "Y": (230, 210, 40)}
CASES = SHARED / "cases" / "pictures"


def _describe(pixels: NDArray[np.uint8]) -> str:
    height, width = pixels.shape[:2]
    quadrants = [pixels[y * height // 4, x * width // 4].astype(int) for y in (1, 3) for x in (1, 3)]
    if all(np.abs(quadrant - grey).max() <= 3 for quadrant, grey in zip(quadrants, (94, 124, 72, 197), strict=True)):
        return f"{width}x{height} grey"
    names = [[name for name, colour in COLOURS.items() if np.abs(quadrant - colour).max() <= 30] for quadrant in quadrants]
    return f"{width}x{height} {''.join(name for near in names for name in near)}"


@pytest.mark.skipif(not CASES.is_dir(), reason="../shared has no pictures that others have reported")
def test_reported_pictures() -> None:
    wrong = {}
    for line in (CASES / "expected.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, expected, *_ = line.split("\t")
        try:
            seen = _describe(pixels_of((CASES / name).read_bytes(), 25 * MEGA))
        except GatewayError as error:
            seen = str(error.status)
        if seen not in expected.split(" or "):
            wrong[name] = seen, expected
    assert wrong == {}
