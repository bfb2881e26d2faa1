"""Fill a model's input tensor from an encoded image: header, memory, tensor, pixels."""

from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import UnsupportedModel
from app.imaging.decode import decode, estimate_decoding
from app.imaging.fit import CenterCrop, Fit, canvas_size, fit_for, shrink
from app.imaging.header import PixelLimits, read_header, require_format
from app.imaging.patch import Patch
from app.imaging.transform import ImageTransform
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.call import CallContext
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget, Reservation
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.transport import InputBuffer, Transport

Source = bytes | Patch
"""What a model is asked about: an encoded image, or a part of a decoded one."""

_QUICK_BYTES = 1 << 20


class Workspace(NamedTuple):
    """Limits and memory of a worker, shared by all images."""

    limits: PixelLimits
    memory: MemoryBudget
    backlog: DecodeBacklog
    transport: Transport


def is_quick_to_check(data: bytes) -> bool:
    """Return whether reading the header takes only microseconds. Pillow, which reads all formats but JPEG, may take longer."""
    return len(data) <= _QUICK_BYTES and data.startswith(b"\xff\xd8\xff")


def fill_input(  # noqa: PLR0913, PLR0917 - the image, its model, and what the worker and the request share
    data: bytes, pixels: int, spec: ModelSpec, workspace: Workspace, call: CallContext, lease: Lease
) -> tuple[InputBuffer, ImageTransform]:
    """Fill the input tensor with an image, or with the encoded file once its header is checked; the lease releases its slot.

    Returns the tensor and the position of the image in it; raises the errors of `read_header` and `decode`, and GatewayFull.
    """
    call.timing.lap("queue")
    start = monotonic()
    transport = workspace.transport
    with workspace.memory.reserve(call.caller) as memory:
        if spec.formats and spec.dtype is None:
            require_format(data, spec.formats)
        header = read_header(data, workspace.limits, memory.add)
        fit = fit_for(spec)
        transform = fit.fit(header.width, header.height)
        if spec.dtype is None:
            buffer = transport.allocate((bytes_element_size(data),), np.uint8, spec.image_bytes, lease)
            write_bytes_element(data, buffer.tensor)
            return buffer, transform
        min_decode_size = transform.min_decode_size
        size, nbytes = estimate_decoding(header, min_decode_size)
        if isinstance(fit, CenterCrop):  # the other fits draw without a copy
            nbytes = max(nbytes, fit.draw_bytes(size, transform))
        memory.add(nbytes)
        buffer, canvas = _allocate(spec, fit, transform, transport, lease)
        fit.draw(decode(header, min_decode_size, transform.area(canvas), allows_truncated=call.allows_truncated), transform, canvas)
        write_pixels(canvas, spec, buffer.tensor)
    workspace.backlog.measure(pixels, monotonic() - start)
    return buffer, transform


def fill_from_patch(
    patch: Patch, spec: ModelSpec, workspace: Workspace, call: CallContext, lease: Lease
) -> tuple[InputBuffer, ImageTransform]:
    """Fill the input tensor with a part of a decoded image, as `fill_input`; raises UnsupportedModel if the model takes files."""
    call.timing.lap("queue")
    if spec.dtype is None:
        raise UnsupportedModel(f"{spec.name} takes encoded files, and so cannot be asked about parts of an image")
    with workspace.memory.reserve(call.caller) as memory:
        pixels, fit = patch.cut(spec), fit_for(spec)
        transform = fit.fit(pixels.shape[1], pixels.shape[0])
        copied = 0 if np.may_share_memory(pixels, patch.image) else pixels.nbytes
        if isinstance(fit, CenterCrop):
            pixels = shrink(pixels, transform.min_decode_size)
            copied += fit.draw_bytes((pixels.shape[1], pixels.shape[0]), transform)
        memory.add(copied, is_refused=False)  # each thread has one at a time, and without it the whole image is held in vain
        buffer, canvas = _allocate(spec, fit, transform, workspace.transport, lease)
        fit.draw(pixels, transform, canvas)
        write_pixels(canvas, spec, buffer.tensor)
    return buffer, transform


def decode_image(data: bytes, pixels: int, workspace: Workspace, call: CallContext, memory: Reservation) -> Patch:
    """Decode an image at its full size; `memory` holds its bytes. `pixels` and errors are those of `fill_input`."""
    call.timing.lap("queue")
    start = monotonic()
    header = read_header(data, workspace.limits, memory.add)
    size = header.width, header.height
    memory.add(estimate_decoding(header, size).nbytes)
    image = decode(header, size, allows_truncated=call.allows_truncated)
    memory.keep(len(data) + image.nbytes)
    workspace.backlog.measure(pixels, monotonic() - start)
    return Patch(image)


def _allocate(
    spec: ModelSpec, fit: Fit, transform: ImageTransform, transport: Transport, lease: Lease
) -> tuple[InputBuffer, NDArray[np.uint8]]:
    assert spec.dtype is not None  # noqa: S101 - checked by the callers
    size = canvas_size(fit, transform) if spec.is_sized_by_image else spec.input_size
    buffer = transport.allocate(spec.shape_of(size), spec.dtype, spec.image_bytes, lease)
    return buffer, buffer.tensor if spec.input_is_canvas else np.empty((*size[::-1], 3), np.uint8)


def write_pixels(pixels: NDArray[np.uint8], spec: ModelSpec, tensor: NDArray[Any]) -> None:
    """Write pixels (height, width, 3) RGB into an input tensor, in the model's channel order, layout, type and normalization."""
    if pixels is tensor:
        return
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
