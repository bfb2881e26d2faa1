"""Read and check the header of an encoded image, format, size and orientation, before anything is decoded."""

import warnings
from io import BytesIO
from typing import NamedTuple

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging import exif, formats, jpeg, opencv

MAX_SIDE = 16384
MAX_ASPECT = 100

# Scans that a JPEG of the largest permitted size may have; a smaller one may have more. Encoders write ten, and 18 for CMYK.
_MAX_FULL_SCANS = 18

# Our own limit is checked on the header, per request; Pillow's only warns, and for the whole process.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Oddities of a caller's image are reported to the caller, if at all.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
# Pillow parses EXIF, MPF and Photoshop's blocks while it opens a JPEG, at a cost unrelated to their size.
for _marker in (0xFFE1, 0xFFE2, 0xFFED):
    JpegImagePlugin.MARKER[_marker] = ("APP", "", JpegImagePlugin.Skip)
# It also decompresses the texts and colour profiles of a PNG, and makes a list of any number of chromaticities.
for _chunk in ("tEXt", "zTXt", "iTXt", "iCCP", "cHRM"):
    delattr(PngImagePlugin.PngStream, f"chunk_{_chunk}")
# And it allocates what will cover a GIF's first frame before the next one, which is never read.
GifImagePlugin.GifImageFile.disposal_method = property(lambda _: 0, lambda *_: None)  # type: ignore[assignment]


class PixelLimits(NamedTuple):
    """Maximum sizes of images, pixels."""

    scalable: int
    """Of formats that can be decoded at a reduced size: JPEG."""
    other: int

    def of(self, name: str) -> int:
        """Return the limit for a format: half for AVIF, a pixel of which takes several times the time and memory of others."""
        if name == "AVIF":
            return self.other // 2
        return self.scalable if name == "JPEG" else self.other


class ImageHeader(NamedTuple):
    """An image of which only the header has been read. One thread may use it, once."""

    data: bytes
    file: Image.Image | None
    """Opened by Pillow; None for a JPEG that libjpeg-turbo reads by itself, and for what OpenCV reads."""
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    orientation: int
    """EXIF, 1 to 8."""
    is_single_scan: bool = True
    """False for a JPEG of which libjpeg has to keep all coefficients in memory."""
    opencv_file: opencv.OpenCvFile | None = None
    """For OpenCV to decode: an AVIF or TIFF."""


def read_header(data: bytes, limits: PixelLimits) -> ImageHeader:
    """Read format, size and orientation.

    Raises:
        UnsupportedFormat: The bytes are not a JPEG, PNG, WebP, BMP, GIF, AVIF or TIFF, or of a kind of it that is not read.
        ImageTooLarge: More pixels than its format may have.
        InvalidImageDimensions: A side is over `MAX_SIDE` pixels, or one is over `MAX_ASPECT` times the other.
        InvalidImage: The header cannot be read, or the file is crafted to exhaust CPU time or memory.
    """
    name = formats.identify(data)
    is_jpeg = name == "JPEG"
    max_pixels = limits.of(name)
    exif_block, scans, is_single_scan = jpeg.read_segments(data) if is_jpeg else jpeg.Segments(b"", 1, is_single_scan=True)
    size = jpeg.read_size(data) if is_jpeg else None
    file = opencv_file = None
    orientation = 1
    if name in opencv.FORMATS:
        opencv_file = opencv.open_file(data, name)
        size, orientation = opencv_file[:2], opencv_file.orientation
    if size is None:
        file = _open(data, name, max_pixels)
        size = file.size
        exif_block = exif_block or file.info.get("exif", b"")
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(f"{width} x {height} pixels; the limit is {max_pixels / 1e6:g} megapixels for {name}")
    if max(width, height) > MAX_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImageDimensions(f"{width} x {height} pixels; the limits are {MAX_SIDE} pixels a side and {MAX_ASPECT} : 1")
    if scans > 1 and scans * width * height > _MAX_FULL_SCANS * limits.scalable:
        raise InvalidImage("the JPEG has too many scans for its size")
    # A PNG may have its EXIF block behind the pixels, where it is not read: such an image is taken as stored.
    orientation = exif.read_orientation(exif_block) if exif_block else orientation
    if exif.is_sideways(orientation):
        width, height = height, width
    return ImageHeader(data, file, width, height, orientation, is_single_scan, opencv_file)


def _open(data: bytes, name: str, max_pixels: int) -> Image.Image:
    try:
        file = Image.open(BytesIO(data), formats=(name,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the limit is {max_pixels / 1e6:g} megapixels for {name}") from error
    except Exception as error:  # Pillow's plugins raise anything on broken input: struct.error, SyntaxError, ValueError ...
        raise InvalidImage(f"the {name} header cannot be read") from error
    if any(tile.codec_name in Image.DECODERS for tile in file.tile):  # those that are written in Python, not in C
        raise UnsupportedFormat(f"the {name} is compressed in a way that is not supported")
    return file
