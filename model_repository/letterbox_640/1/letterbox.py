"""Decoding and letterbox as a DALI pipeline; on a GPU, nvJPEG decodes."""

from nvidia.dali import fn, math, pipeline_def, types
from nvidia.dali.data_node import DataNode


@pipeline_def
def letterbox(*, square: int, placement: str, enlarge: bool, pad: int, device: str) -> DataNode:
    """Turn a batch of encoded files, the input `files`, into UINT8 (square, square, 3) RGB, upright.

    Sizes and positions are those of `app/imaging/fit.py`, to the pixel; so is the interpolation, which does not average
    when it shrinks. Unlike there, large JPEGs are decoded at their full size.

    Args:
        square: Side of the canvas, pixels.
        placement: `center` or `top_left`: where the image lies on it.
        enlarge: Whether small images are enlarged to it.
        pad: Value of every byte around the image, 0 to 255.
        device: `gpu`, or `cpu` for a machine that has none.
    """
    is_centred = placement == "center"
    files = fn.external_source(name="files", device="cpu", dtype=types.UINT8, ndim=1)
    shape = fn.peek_image_shape(files, dtype=types.INT32)[:2]
    size, side = (fn.cast(value, dtype=types.FLOAT64) for value in (shape, fn.reductions.max(shape)))
    scale = square / side
    if not enlarge:
        scale = math.min(scale, 1.0)
    inner = math.clamp(_round(size * scale) if is_centred else math.floor(size * scale), 1, square)
    outer = math.floor((square - inner) / 2 + 0.4) if is_centred else inner * 0
    images = fn.decoders.image(files, device="mixed" if device == "gpu" else "cpu", output_type=types.RGB)
    images = fn.resize(images, size=fn.cast(inner, dtype=types.FLOAT), interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.slice(
        images,
        start=fn.cast(-outer, dtype=types.INT32),
        shape=[square, square],
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=pad,
    )


def _round(values: DataNode) -> DataNode:
    """Round FLOAT64 values to the nearest integer, and half to the even one, as Python does."""
    up = math.floor(values + 0.5)
    is_half, is_odd = up - values == 0.5, up - 2 * math.floor(up / 2)  # noqa: PLR2004
    return up - is_half * is_odd
