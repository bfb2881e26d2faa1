"""The way from an encoded image to a filled canvas: header checked, canvas taken, image drawn."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.imaging.decode import decode
from app.imaging.header import read_header
from app.imaging.letterbox import Letterbox, LetterboxTransform


def check(data: bytes, letterbox: Letterbox, max_pixels: int) -> LetterboxTransform:
    """Check an image that will be decoded elsewhere.

    Args:
        data: The encoded image.
        letterbox: How whoever decodes it will fit it.
        max_pixels: Largest image.

    Raises:
        GatewayError: As `read_header` says.
    """
    header = read_header(data, max_pixels)
    return letterbox.fit(header.width, header.height)


def render(data: bytes, letterbox: Letterbox, max_pixels: int, take_canvas: Callable[[], NDArray[np.uint8]]) -> LetterboxTransform:
    """Draw an image on a canvas.

    Args:
        data: The encoded image.
        letterbox: How to fit it.
        max_pixels: Largest image.
        take_canvas: Called once the header is accepted; returns UINT8 (height, width, 3) of the letterbox's size,
            every byte of which is then written.

    Raises:
        GatewayError: As `read_header` and `decode` say.
    """
    header = read_header(data, max_pixels)
    transform = letterbox.fit(header.width, header.height)
    canvas = take_canvas()
    pixels = decode(header, transform.decode_size, transform.area(canvas))
    letterbox.draw(pixels, transform, canvas)
    return transform
