"""Fill a model's input tensor from an encoded image."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.imaging import canvas
from app.imaging.fit import fit_for
from app.imaging.header import PixelLimits
from app.imaging.transform import ImageTransform
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.buffer import InputBuffer
from app.triton.messages import bytes_element_size, write_bytes_element


def fill_input(
    data: bytes, spec: ModelSpec, limits: PixelLimits, reserve: Callable[[int], None], buffer: InputBuffer
) -> ImageTransform:
    """Fill the input tensor for one image: with its pixels, or with the file itself after a check of its header.

    Args:
        data: The encoded image.
        spec: Spec of the model.
        limits: Maximum sizes of images.
        reserve: Called with the memory that decoding takes, as `canvas.draw_image` says; not for a file.
        buffer: Gets the tensor.

    Returns:
        Where the image lies in the model's input.

    Raises:
        GatewayError: The image is rejected, as `canvas.draw_image` says.
    """
    fit = fit_for(spec)
    dtype = spec.dtype
    if dtype is None:
        transform = canvas.check_image(data, fit, limits)
        write_bytes_element(data, buffer.allocate((bytes_element_size(data),), np.uint8, spec.image_bytes))
        return transform
    pixels: NDArray[np.uint8] | None = None

    def allocate_canvas() -> NDArray[np.uint8]:
        nonlocal pixels
        tensor = buffer.allocate(spec.image_shape, dtype, spec.image_bytes)
        if spec.input_is_canvas:
            return tensor
        width, height = spec.input_size
        pixels = np.empty((height, width, 3), np.uint8)
        return pixels

    transform = canvas.draw_image(data, fit, limits, reserve, allocate_canvas)
    if pixels is not None:
        _write_pixels(pixels, spec, buffer.tensor)
    return transform


def _write_pixels(pixels: NDArray[np.uint8], spec: ModelSpec, tensor: NDArray[Any]) -> None:
    """Write pixels (height, width, 3) RGB into the input tensor, in the model's channel order, layout, type and normalization."""
    if spec.channels == "BGR":
        pixels = pixels[:, :, ::-1]
    if spec.input_format is InputFormat.CHW:
        pixels = pixels.transpose(2, 0, 1)
    if spec.dtype is np.uint8:
        tensor[:] = pixels
        return
    subtrahend, divisor = spec.normalization
    if subtrahend.any():
        pixels = np.subtract(pixels, subtrahend, out=tensor, dtype=np.float32, casting="same_kind")
    np.divide(pixels, divisor, out=tensor, dtype=np.float32, casting="same_kind")
