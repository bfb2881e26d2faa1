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
    size = fn.peek_image_shape(files, dtype=types.FLOAT)[:2]
    scale = square / fn.reductions.max(size)
    if not enlarge:
        scale = math.min(scale, 1.0)
    inner = math.clamp(math.floor(size * scale + (0.5 if is_centred else 0.0)), 1, square)
    outer = math.floor((square - inner) / 2 + 0.4) if is_centred else inner * 0
    images = fn.decoders.image(files, device="mixed" if device == "gpu" else "cpu", output_type=types.RGB)
    images = fn.resize(images, size=inner, interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.slice(
        images,
        start=fn.cast(-outer, dtype=types.INT32),
        shape=[square, square],
        axis_names="HW",
        out_of_bounds_policy="pad",
        fill_values=pad,
    )
