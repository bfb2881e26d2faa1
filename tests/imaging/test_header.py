"""Headers: what they tell, and which images are refused because of them."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging.decode import decode
from app.imaging.header import MAX_ASPECT, MAX_SIDE, PixelLimits, read_header
from tests.imaging.samples import (
    FORMATS,
    GREY,
    MEGA,
    NOISE,
    PIXELS,
    encode,
    exif_of,
    hostile_tags,
    insert_segment,
    limits,
    png,
    png_chunk,
    store,
)


@pytest.mark.parametrize("image_format", FORMATS)
def test_size_is_read(image_format: str) -> None:
    header = read_header(encode(Image.fromarray(PIXELS), image_format), limits(MEGA))

    assert (header.width, header.height, header.orientation) == (32, 16, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "JPEG"])
def test_size_is_that_of_the_upright_image(image_format: str, orientation: int) -> None:
    """Width and height are swapped where the orientation says that the image lies on its side."""
    data = encode(Image.fromarray(store(PIXELS, orientation)), image_format, exif=exif_of(orientation))

    header = read_header(data, limits(MEGA))

    assert (header.width, header.height, header.orientation) == (32, 16, orientation)


@pytest.mark.parametrize(("mode", "is_open"), [("RGB", False), ("L", False), ("CMYK", True)])
def test_pillow_opens_only_unusual_jpegs(mode: str, *, is_open: bool) -> None:
    """A JPEG that libjpeg-turbo can read by itself is not opened a second time."""
    header = read_header(encode(Image.new(mode, (32, 16)), "JPEG"), limits(MEGA))

    assert (header.file is not None) is is_open


@pytest.mark.parametrize(("marker", "identifier"), [(0xE1, b"Exif\0\0"), (0xE2, b"MPF\0")])
def test_pillow_does_not_parse_the_blocks_of_a_jpeg(marker: int, identifier: bytes) -> None:
    """A block of tags that each claim the whole block costs no memory, also in a CMYK JPEG, which Pillow opens."""
    data = insert_segment(encode(Image.new("CMYK", (32, 16)), "JPEG"), marker, identifier + hostile_tags())
    tracemalloc.start()
    header = read_header(data, limits(MEGA))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert decode(header, (32, 16)).shape == (16, 32, 3)
    assert peak < 5_000_000


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000))),
        png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000))),
        png_chunk(b"cHRM", bytes(100_000)),
    ],
    ids=["text", "profile", "chromaticities"],
)
def test_pillow_does_not_parse_the_texts_and_profiles_of_a_png(chunk: bytes) -> None:
    """Chunks that unpack to many times their size cost no memory, before the pixels or behind them."""
    plain = encode(Image.fromarray(PIXELS), "PNG")
    for at in (33, plain.index(b"IEND") - 4):
        tracemalloc.start()
        header = read_header(plain[:at] + chunk + plain[at:], limits(MEGA))
        pixels = decode(header, (32, 16))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        np.testing.assert_array_equal(pixels, PIXELS)
        assert peak < 800_000


def test_nothing_is_allocated_for_the_second_frame_of_a_gif() -> None:
    """No frame but the first is read, whatever its disposal method."""
    data = encode(Image.new("P", (32, 16), 3), "GIF", disposal=2, transparency=0)

    header = read_header(data, limits(MEGA))

    assert isinstance(header.file, GifImageFile)
    assert header.file.dispose is None


def write_bmp(header: bytes, pixels: bytes) -> bytes:
    start = 14 + len(header) + 1024
    return struct.pack("<2sIII", b"BM", start + len(pixels), 0, start) + header + bytes(range(1, 5)) * 256 + pixels


@pytest.mark.parametrize("size", [40, 64, 108, 124], ids=["Windows 3", "OS/2 2", "Windows 4", "Windows 5"])
@pytest.mark.parametrize(("compression", "depth"), [(1, 8), (2, 4)])
def test_compressed_bmp_is_refused(size: int, compression: int, depth: int) -> None:
    """Pillow would decode it in Python: eight seconds for a file of 13 KB; the same file without compression is accepted."""
    header = struct.pack("<IiiHHI", size, 32, 16, 1, depth, compression).ljust(size, b"\0")
    assert read_header(write_bmp(header[:16] + bytes(4) + header[20:], bytes(512)), limits(MEGA)).width == 32

    with pytest.raises(UnsupportedFormat, match="the BMP is compressed"):
        read_header(write_bmp(header, b"\x20\1\0\0" * 16), limits(MEGA))


def resize_header(jpeg: bytes, width: int, height: int) -> bytes:
    """Change the size in the frame header of a progressive JPEG."""
    at = jpeg.index(b"\xff\xc2") + 5
    return jpeg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 4 :]


def test_scans_count_by_the_pixels_they_visit() -> None:
    """The ten scans that encoders write are accepted at any size, and more of them in a smaller image."""
    data = encode(Image.fromarray(PIXELS), "JPEG", progressive=True)
    assert data.count(b"\xff\xda") == 10

    assert read_header(resize_header(data, 10_000, 5_000), limits(50 * MEGA)).height == 5_000
    scan = data[data.rindex(b"\xff\xda") : -2]
    data = data[:-2] + 80 * scan + data[-2:]
    assert read_header(resize_header(data, 5_000, 2_000), limits(50 * MEGA)).height == 2_000
    with pytest.raises(InvalidImage, match="too many scans for its size"):
        read_header(resize_header(data, 5_000, 2_001), limits(50 * MEGA))


@pytest.mark.parametrize("image_format", FORMATS)
def test_file_of_a_few_bytes_is_refused(image_format: str) -> None:
    """However few bytes of a file arrive, the error says that it is not an image or an invalid one."""
    data = encode(NOISE, image_format)

    for length in range(40):
        with pytest.raises((UnsupportedFormat, InvalidImage)):
            decode(read_header(data[:length], limits(MEGA)), (64, 48))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"GIF",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\0\0\0\0WAVE",
        b"not an image",
    ],
)
def test_other_formats_are_refused(data: bytes) -> None:
    """Data that does not begin like one of the formats is refused, and the message lists the formats."""
    with pytest.raises(UnsupportedFormat, match=r"not an image in a supported format \(JPEG, PNG, WEBP, GIF, BMP, AVIF, TIFF\)"):
        read_header(data, limits(MEGA))


def test_a_format_that_only_pillow_reads_is_refused() -> None:
    with pytest.raises(UnsupportedFormat):
        read_header(encode(NOISE, "PPM"), limits(MEGA))


def test_unreadable_header_names_the_format() -> None:
    """The right first bytes with garbage behind them are an invalid image, not an unsupported format."""
    with pytest.raises(InvalidImage, match="the PNG header"):
        read_header(b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, limits(MEGA))


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 10), (10, 0)])
def test_image_without_pixels_is_invalid(width: int, height: int) -> None:
    with pytest.raises(InvalidImage):
        read_header(png(width, height, 8, GREY), limits(MEGA))


def test_pixel_limit_is_inclusive() -> None:
    """An image of exactly the limit is accepted; one with one more row is not."""
    assert read_header(png(100, 50, 8, GREY), limits(5000)).height == 50

    with pytest.raises(ImageTooLarge, match="100 x 51 pixels"):
        read_header(png(100, 51, 8, GREY), limits(5000))


@pytest.mark.parametrize("image_format", FORMATS)
def test_only_a_jpeg_may_have_the_pixels_of_scalable_formats(image_format: str) -> None:
    """Any other image is decoded at its full size, which takes more memory."""
    data = encode(NOISE, image_format)
    most = NOISE.width * NOISE.height * (2 if image_format == "AVIF" else 1)
    assert read_header(data, PixelLimits(scalable=most, other=most)).height == NOISE.height

    small = PixelLimits(0, most) if image_format == "JPEG" else PixelLimits(most, 0)
    with pytest.raises(ImageTooLarge, match=f"the limit is 0 megapixels for {image_format}"):
        read_header(data, small)


def test_cmyk_jpeg_may_have_the_pixels_of_scalable_formats() -> None:
    """Pillow can reduce CMYK JPEGs while decoding as well."""
    data = encode(NOISE.convert("CMYK"), "JPEG")

    assert read_header(data, PixelLimits(scalable=MEGA, other=0)).height == NOISE.height


@pytest.mark.parametrize(("width", "height"), [(13000, 13000), (16000, 16000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    """A small file that would unpack to gigabytes is too large, also beyond Pillow's own limit."""
    data = png(width, height, 1, GREY)

    with pytest.raises(ImageTooLarge, match="the limit is 50 megapixels"):
        read_header(data, limits(50 * MEGA))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_only_our_own_pixel_limit_counts() -> None:
    """An image that Pillow would warn about is accepted where the limit allows it."""
    header = read_header(png(13000, 13000, 1, GREY), limits(178 * MEGA))

    assert (header.width, header.height) == (13000, 13000)


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE, 164), (164, MAX_SIDE), (MAX_ASPECT, 1), (1, MAX_ASPECT), (1, 1)])
def test_dimensions_at_their_limits_are_accepted(width: int, height: int) -> None:
    header = read_header(png(width, height, 8, GREY), limits(3 * MEGA))

    assert (header.width, header.height) == (width, height)


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE + 1, 200), (200, MAX_SIDE + 1), (101, 1), (1, 101), (1000, 9)])
def test_dimensions_beyond_their_limits_are_refused(width: int, height: int) -> None:
    """Dimensions that no detector can use are refused, and the message names the limits."""
    message = f"{width} x {height} pixels; the limits are 16384 pixels a side and 100 : 1"
    with pytest.raises(InvalidImageDimensions, match=message):
        read_header(png(width, height, 8, GREY), limits(50 * MEGA))
