"""Decode images to upright RGB pixels.

Modes that Pillow cannot convert faithfully have a conversion of their own (16 bits would clip to white), and alpha is
dropped, as in the images that detectors are trained on.
"""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.errors import InvalidImage
from app.imaging import exif, jpeg
from app.imaging.header import ImageHeader


def decode(header: ImageHeader, min_decode_size: tuple[int, int], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode, convert to RGB and turn upright.

    Args:
        header: From `read_header`.
        min_decode_size: Width and height in pixels, upright, that the caller needs. A larger JPEG may be decoded at a
            reduced size, but not below this one, which is many times faster.
        out: Where to put the pixels if they come out at exactly its size and upright.

    Returns:
        UINT8 (height, width, 3) RGB, upright, of the true size or smaller; `out` itself if it was used.

    Raises:
        InvalidImage: The data is truncated or corrupt.
    """
    size = header.width, header.height
    if exif.is_sideways(header.orientation):
        size, min_decode_size = size[::-1], min_decode_size[::-1]
    pixels = None
    if header.file is None:
        pixels = jpeg.decode(header.data, size, min_decode_size, out if header.orientation == 1 else None)
    if pixels is None:
        try:
            file = header.file or Image.open(BytesIO(header.data), formats=("JPEG",))
            if file.format in {"JPEG", "MPO"}:
                file.draft(file.mode, min_decode_size)
            file.load()
            pixels = np.asarray(_to_rgb(file))
        except Exception as error:  # Pillow's decoders raise anything on broken input
            raise InvalidImage("the image data is truncated or corrupt") from error
    return exif.turn_upright(pixels, header.orientation)


def _to_rgb(file: Image.Image) -> Image.Image:
    if file.mode == "RGB":
        return file
    if file.mode.startswith("I"):  # 16 bits a pixel; convert() would clip instead of scaling
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    file.info.pop("transparency", None)  # convert() would warn of it, and does not blend anyway
    return file.convert("RGB")
