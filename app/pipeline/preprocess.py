"""An encoded image to the input tensor of a model: header, memory, tensor, pixels, one after the other."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.decode import decode, estimate_decoding
from app.imaging.fit import CenterCrop, fit_for
from app.imaging.header import PixelLimits, read_header
from app.imaging.transform import ImageTransform
from app.model.spec import InputFormat, ModelSpec
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.transport import InputBuffer, Transport

_QUICK_BYTES = 1 << 20


class Workspace(NamedTuple):
    """What a worker has for the images of all its requests."""

    limits: PixelLimits
    """Maximum sizes of images."""
    memory: MemoryBudget
    """For decoding."""
    transport: Transport
    """Where input tensors lie."""


def is_quick_to_check(data: bytes) -> bool:
    """Return whether the header is read in next to no time, whatever the bytes are. Pillow reads all headers but JPEG's."""
    return len(data) <= _QUICK_BYTES and data.startswith(b"\xff\xd8\xff")


def fill_input(data: bytes, spec: ModelSpec, workspace: Workspace, lease: Lease) -> tuple[InputBuffer, ImageTransform]:
    """Fill the input tensor for one image: with its pixels, or with the file itself after a check of its header.

    Args:
        data: The encoded image.
        spec: Spec of the model.
        workspace: Where decoding and the tensor find memory.
        lease: The tensor's slot is given back with it.

    Returns:
        The tensor, and where the image lies in the model's input.

    Raises:
        GatewayFull: There is no memory to decode it now.
        GatewayError: The image is rejected, as `read_header` and `decode` say.
    """
    header = read_header(data, workspace.limits)
    fit = fit_for(spec)
    transform = fit.fit(header.width, header.height)
    transport = workspace.transport
    if spec.dtype is None:
        buffer = transport.allocate((bytes_element_size(data),), np.uint8, spec.image_bytes, lease)
        write_bytes_element(data, buffer.tensor)
        return buffer, transform
    min_decode_size = transform.min_decode_size
    size, nbytes = estimate_decoding(header, min_decode_size)
    if isinstance(fit, CenterCrop):  # the others draw without a copy
        nbytes = max(nbytes, fit.draw_bytes(size, transform))
    with workspace.memory.reserve() as memory:
        memory.add(nbytes)
        buffer = transport.allocate(spec.image_shape, spec.dtype, spec.image_bytes, lease)
        canvas = buffer.tensor if spec.input_is_canvas else np.empty((*spec.input_size[::-1], 3), np.uint8)
        fit.draw(decode(header, min_decode_size, transform.area(canvas)), transform, canvas)
        if canvas is not buffer.tensor:
            _write_pixels(canvas, spec, buffer.tensor)
    return buffer, transform


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
