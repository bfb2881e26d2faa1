"""Check an image's header, allocate a canvas and draw the image on it: what the pipeline needs of this package for a request."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.imaging.decode import ARRAY_BYTES, decode, decoded_size, estimate_decode_bytes
from app.imaging.fit import Fit
from app.imaging.header import PixelLimits, read_header
from app.imaging.transform import ImageTransform

_QUICK_BYTES = 1 << 20


def is_quick_to_check(data: bytes) -> bool:
    """Return whether `check_image` takes next to no time, whatever the bytes are. Pillow reads all headers but JPEG's."""
    return len(data) <= _QUICK_BYTES and data.startswith(b"\xff\xd8\xff")


def check_image(data: bytes, fit: Fit, limits: PixelLimits) -> ImageTransform:
    """Check an image that will be decoded elsewhere.

    Args:
        data: The encoded image.
        fit: How it will be fitted.
        limits: Maximum sizes of images.

    Raises:
        GatewayError: As `read_header` says.
    """
    header = read_header(data, limits)
    return fit.fit(header.width, header.height)


def draw_image(
    data: bytes,
    fit: Fit,
    limits: PixelLimits,
    reserve: Callable[[int], None],
    allocate_canvas: Callable[[], NDArray[np.uint8]],
) -> ImageTransform:
    """Decode an image and draw it on a canvas.

    Args:
        data: The encoded image.
        fit: How to fit it.
        limits: Maximum sizes of images.
        reserve: Called once the header is accepted, with an estimate of the memory that decoding and drawing take, bytes; raises
            what the caller wants to be raised if there is none.
        allocate_canvas: Called after that; returns UINT8 (height, width, 3) of the size of `fit`,
            every byte of which is then written.

    Raises:
        GatewayError: As `read_header` and `decode` say.
    """
    header = read_header(data, limits)
    transform = fit.fit(header.width, header.height)
    width, height = size = decoded_size(header, transform.min_decode_size)
    draw_bytes = width * height * ARRAY_BYTES + fit.draw_bytes(size, transform)
    reserve(max(estimate_decode_bytes(header, transform.min_decode_size), draw_bytes))
    canvas = allocate_canvas()
    target = transform.area(canvas) if transform.crop is None else None
    pixels = decode(header, transform.min_decode_size, target)
    fit.draw(pixels, transform, canvas)
    return transform
