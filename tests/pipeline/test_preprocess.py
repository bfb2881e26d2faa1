"""Filling the input tensor from an encoded image or a part of one, for all types, layouts and channel orders, and with files."""

from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.imaging.decode import decode
from app.imaging.fit import fit_for
from app.imaging.header import read_header
from app.model.spec import ModelSpec
from app.resilience.lease import Lease
from app.triton.transport import InputBuffer, Transport
from tests.imaging.samples import GREY, NOISE, RGB, encode, exif_of, png, store
from tests.model.configs import spec_of, table
from tests.support import fill, sample_image, workspace

PIXELS = np.random.default_rng(4).integers(0, 256, (4, 6, 3), np.uint8)


def spec(*dims: int, data_type: str = "TYPE_UINT8", **hints: str) -> ModelSpec:
    return spec_of(image=table(*dims, data_type=data_type), batch=0, **hints)


LETTERBOXES = {
    "centred": spec(64, 96, 3),
    "top left": spec(64, 96, 3, placement="top_left", pad="0"),
    "not enlarged": spec(64, 96, 3, enlarge="false", pad="255"),
    "exactly fitting": spec(48, 64, 3),
    "full width": spec(64, 64, 3),
}
FITS = [*LETTERBOXES.values(), *(spec(64, 96, 3, resize=resize) for resize in ("center_crop", "stretch"))]
BYTES = st.integers(0, 255)
PALETTES = (
    st.lists(st.tuples(BYTES, BYTES, BYTES), min_size=1, max_size=256)
    | st.lists(BYTES.map(lambda grey: (grey,) * 3), min_size=1, max_size=256)
    | st.just([(0, 0, 0), (255, 255, 255)])
    | st.integers(1, 256).map(lambda greys: [(grey,) * 3 for grey in range(greys)])
).map(lambda colours: np.array(colours, np.uint8))
FORMATS_BY_MODE = {
    **dict.fromkeys(("RGB", "RGBA"), ("PNG", "WEBP", "BMP", "TIFF")),
    **dict.fromkeys(("P", "L", "1"), ("PNG", "BMP", "TIFF", "GIF")),
    "LA": ("PNG", "TIFF"),
}
"""Lossless formats that store a mode of Pillow."""
IMAGES = {
    "JPEG": encode(NOISE, "JPEG", quality=75, subsampling=2),
    "turned JPEG": encode(Image.fromarray(store(np.asarray(NOISE), 6)), "JPEG", exif=exif_of(6)),
    "large JPEG": sample_image("chelsea.jpg"),
    "sliver": encode(NOISE.crop((0, 0, 64, 1)), "JPEG"),
    "PNG": encode(NOISE, "PNG"),
}


class UsedMemory(Transport):
    """Allocates tensors in memory that is not empty."""

    def __init__(self, content: int) -> None:
        super().__init__("inline")
        self._content = content

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic], slot_bytes: int, lease: Lease) -> InputBuffer:  # noqa: ARG002
        return InputBuffer(np.full(shape, self._content, dtype), None)


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize(
    ("data_type", "dtype", "tolerance"),
    [("TYPE_UINT8", np.uint8, 0), ("TYPE_FP32", np.float32, 1e-5), ("TYPE_FP16", np.float16, 4e-3)],
)
@pytest.mark.parametrize("dims", [[3, 4, 6], [4, 6, 3]])
def test_pixels_become_the_tensor(dims: list[int], data_type: str, dtype: type, tolerance: float, channels: str) -> None:
    """The canvas is the tensor itself only for UINT8, HWC and RGB. A model with UINT8 input normalizes the pixels itself."""
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = PIXELS if channels == "RGB" else PIXELS[:, :, ::-1]
    by_hint = {"scale": expected / np.float32(127.5), "mean": (expected / 255 - mean) / std}
    for hints in ({"scale": "127.5"}, {"mean": "0.485,0.456,0.406", "std": "0.229,0.224,0.225"}):
        model = spec(*dims, data_type=data_type, channels=channels, **hints)
        values = expected if dtype is np.uint8 else by_hint[next(iter(hints))]
        with Lease() as lease:
            tensor = fill(encode(Image.fromarray(PIXELS), "BMP"), model, Transport("inline"), lease)[0].tensor.copy()

        assert tensor.dtype == dtype
        assert tensor.nbytes == model.image_bytes
        np.testing.assert_allclose(tensor, values.transpose(2, 0, 1) if dims[0] == 3 else values, rtol=0, atol=tolerance)
        assert model.input_is_canvas is (dtype is np.uint8 and dims[0] == 4 and channels == "RGB")


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("model", LETTERBOXES.values(), ids=LETTERBOXES)
async def test_each_byte_of_the_canvas_is_written(model: ModelSpec, data: bytes) -> None:
    with Lease() as lease:
        (one, transform), (other, again) = (fill(data, model, UsedMemory(content), lease) for content in (7, 201))

    np.testing.assert_array_equal(one.tensor, other.tensor)
    assert transform == again
    outside = np.ones(one.tensor.shape, bool)
    transform.area(outside.view(np.uint8))[:] = 0
    assert (one.tensor[outside] == model.pad).all()
    expected = np.empty_like(one.tensor)
    header = read_header(data, workspace(UsedMemory(0)).limits)
    fit_for(model).draw(decode(header, transform.min_decode_size), transform, expected)
    np.testing.assert_array_equal(one.tensor, expected)  # decoded elsewhere and drawn


def copies(indices: NDArray[np.uint8], palette: NDArray[np.uint8], orientation: int) -> Iterator[tuple[str, bytes]]:
    """Store the same image, whose colours `palette[indices]` are, in all lossless ways; return what they are and the files."""
    pixels = palette[indices]
    height, width = indices.shape
    grey, deep = Image.fromarray(pixels[:, :, 0]), pixels.astype(np.uint16) * 257
    by_mode = {"RGB": Image.fromarray(pixels), "P": Image.fromarray(indices)}
    by_mode["P"].putpalette(palette.tobytes())
    by_mode["RGBA"] = by_mode["RGB"].convert("RGBA")
    if (pixels == pixels[:, :, :1]).all():
        by_mode |= {"L": grey, "LA": grey.convert("LA")}
        yield "grey PNG of 16 bits", png(width, height, 16, GREY, deep[:, :, 0].astype(">u2").tobytes())
        if {*pixels.flat} <= {0, 255}:
            by_mode["1"] = grey.convert("1")
    for mode, image in by_mode.items():
        yield from ((f"{mode} {name}", encode(image, name)) for name in FORMATS_BY_MODE[mode])
    yield "PNG of 16 bits", png(width, height, 16, RGB, deep.astype(">u2").tobytes())
    yield "TIFF of 16 bits", cv2.imencode(".tiff", deep[:, :, ::-1])[1].tobytes()
    for number in (1, 5, 8, 32773):  # none, LZW, Deflate and PackBits
        yield f"TIFF {number}", cv2.imencode(".tiff", pixels[:, :, ::-1], [cv2.IMWRITE_TIFF_COMPRESSION, number])[1].tobytes()
    stored = Image.fromarray(store(pixels, orientation))
    yield from ((f"turned {name}", encode(stored, name, exif=exif_of(orientation))) for name in ("PNG", "WEBP", "TIFF"))


@example(FITS[-2], 3, 1, np.zeros((1, 3), np.uint8), 0, 4)  # a mirrored row
@given(st.sampled_from(FITS), st.integers(1, 40), st.integers(1, 40), PALETTES, st.integers(0, 99), st.integers(1, 8))
def test_how_an_image_is_stored_changes_nothing(  # noqa: PLR0913, PLR0917 - what is drawn
    model: ModelSpec, width: int, height: int, palette: NDArray[np.uint8], seed: int, orientation: int
) -> None:
    indices = np.random.default_rng(seed).integers(0, len(palette), (height, width), np.uint8)
    expected = np.empty(model.image_shape, np.uint8)
    fit = fit_for(model)
    fit.draw(palette[indices], fit.fit(width, height), expected)

    for name, data in copies(indices, palette, orientation):
        with Lease() as lease:
            buffer, transform = fill(data, model, UsedMemory(0), lease)
            np.testing.assert_array_equal(buffer.tensor, expected, name)
        assert transform == fit.fit(width, height), name
