"""The input tensor of a model from an encoded image: every type and order of axes and channels, and files as they are."""

import tracemalloc
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging.header import PixelLimits
from app.imaging.transform import ImageTransform
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.preprocess import fill_input
from app.triton.arena_size import SLOTS
from app.triton.transport import Transport
from tests.fakes.triton import CONFIG
from tests.support import open_buffer
from tests.world import World

LIMITS = PixelLimits(10**6, 10**6)
PIXELS = np.random.default_rng(4).integers(0, 256, (4, 6, 3), np.uint8)


def unlimited(_: int) -> None: ...


def spec(data_type: str, dims: list[int], batch: int = 0, **hints: str) -> ModelSpec:
    config = {
        **CONFIG,
        "max_batch_size": batch,
        "input": [{"name": "image", "data_type": data_type, "dims": dims}],
        "parameters": {name: {"string_value": value} for name, value in hints.items()},
    }
    return from_triton_config(config, "1")


def file(pixels: NDArray[np.uint8], image_format: str = "BMP", **options: Any) -> bytes:  # noqa: ANN401
    encoded = BytesIO()
    Image.fromarray(pixels).save(encoded, image_format, **options)
    return encoded.getvalue()


@pytest.fixture
def inline() -> Transport:
    return Transport("inline")


def filled(transport: Transport, data: bytes, model: ModelSpec) -> NDArray[Any]:
    """Fill an input and return a copy of the tensor."""
    with open_buffer(transport) as buffer:
        fill_input(data, model, LIMITS, unlimited, buffer)
        return buffer.tensor.copy()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize(("data_type", "dtype"), [("TYPE_UINT8", np.uint8), ("TYPE_FP32", np.float32), ("TYPE_FP16", np.float16)])
@pytest.mark.parametrize("dims", [[3, 4, 6], [4, 6, 3]])
async def test_pixels_become_the_tensor(  # noqa: PLR0913, PLR0917 - a table
    inline: Transport, dims: list[int], data_type: str, dtype: type, channels: str, batch: int
) -> None:
    """Order of axes and channels, type and scale are those of the spec; only a canvas as it is needs no copy."""
    model = spec(data_type, dims, batch, channels=channels, scale="127.5")
    expected = PIXELS if channels == "RGB" else PIXELS[:, :, ::-1]
    expected = expected.transpose(2, 0, 1) if dims[0] == 3 else expected
    values = expected if dtype is np.uint8 else (expected / np.float32(127.5)).astype(dtype)

    tensor = filled(inline, file(PIXELS), model)

    assert tensor.dtype == dtype
    assert tensor.nbytes == model.image_bytes
    np.testing.assert_array_equal(tensor, values)
    assert model.input_is_canvas is (dtype is np.uint8 and dims[0] == 4 and channels == "RGB")


@pytest.mark.parametrize(("data_type", "tolerance"), [("TYPE_FP32", 1e-5), ("TYPE_FP16", 4e-3)])
@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize("dims", [[3, 4, 6], [4, 6, 3]])
async def test_each_channel_is_normalized(
    inline: Transport, dims: list[int], channels: str, data_type: str, tolerance: float
) -> None:
    """By its own mean and deviation, in the order of the model's channels, after the scale; pixels below the mean, too."""
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    model = spec(data_type, dims, channels=channels, mean="0.485,0.456,0.406", std="0.229,0.224,0.225")
    expected = ((PIXELS if channels == "RGB" else PIXELS[:, :, ::-1]) / 255 - mean) / std
    expected = expected.transpose(2, 0, 1) if dims[0] == 3 else expected

    np.testing.assert_allclose(filled(inline, file(PIXELS), model), expected, atol=tolerance)


async def test_bytes_are_not_normalized(inline: Transport) -> None:
    """A model that takes bytes normalizes them itself."""
    model = spec("TYPE_UINT8", [4, 6, 3], mean="1,2,3", std="2,2,2", scale="2")

    np.testing.assert_array_equal(filled(inline, file(PIXELS), model), PIXELS)


async def test_a_scale_of_one_keeps_the_bytes(inline: Transport) -> None:
    """YOLOX's floats are 0 to 255, and its channels BGR."""
    pixels = np.random.default_rng(5).integers(0, 256, (32, 32, 3), np.uint8)
    config = {
        **CONFIG,
        "max_batch_size": 1,
        "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
        "output": [{"name": "output", "data_type": "TYPE_FP32", "dims": [21, 85]}],
    }
    tensor = filled(inline, file(pixels), from_triton_config(config, "1"))

    np.testing.assert_array_equal(tensor[::-1], pixels.transpose(2, 0, 1).astype(np.float32))


@pytest.mark.parametrize(
    ("data_type", "dims", "channels"),
    [("TYPE_UINT8", [4, 6, 3], "RGB"), ("TYPE_FP32", [3, 4, 6], "RGB"), ("TYPE_UINT8", [3, 4, 6], "BGR")],
)
async def test_the_tensor_is_the_same_in_shared_memory(
    inline: Transport, world: World, data_type: str, dims: list[int], channels: str
) -> None:
    """The previous content of the slot must not remain."""
    model = spec(data_type, dims, channels=channels)
    await world.transport.prepare(model.image_bytes)
    slot = world.transport.take(model.image_bytes, model.image_bytes)
    assert slot
    slot.array((model.image_bytes,), np.uint8)[:] = 77
    slot.free()
    data = file(PIXELS[:2])
    with open_buffer(world.transport) as buffer:
        fill_input(data, model, LIMITS, unlimited, buffer)
        assert buffer.slot == slot
        np.testing.assert_array_equal(slot.array(buffer.tensor.shape, buffer.tensor.dtype.type), buffer.tensor)
        np.testing.assert_array_equal(buffer.tensor, filled(inline, data, model))


async def test_the_transform_says_where_the_image_lies(inline: Transport) -> None:
    model = spec("TYPE_UINT8", [32, 32, 3], pad="9")
    with open_buffer(inline) as buffer:
        transform = fill_input(file(np.full((50, 100, 3), 200, np.uint8)), model, LIMITS, unlimited, buffer)
        canvas = buffer.tensor.copy()

    assert transform == ImageTransform(0, 8, 32, 16, 100, 50)
    assert (transform.area(canvas) == 200).all()
    assert (canvas[:8] == 9).all()
    assert (canvas[24:] == 9).all()


@pytest.mark.parametrize("placement", ["center", "top_left"])
async def test_the_letterbox_is_that_of_the_spec(inline: Transport, placement: str) -> None:
    model = spec("TYPE_UINT8", [32, 32, 3], placement=placement, enlarge="false")
    with open_buffer(inline) as buffer:
        transform = fill_input(file(PIXELS), model, LIMITS, unlimited, buffer)

    assert (transform.width, transform.height) == (6, 4)
    assert (transform.left, transform.top) == ((13, 14) if placement == "center" else (0, 0))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
async def test_a_file_is_passed_on_as_it_is(inline: Transport, image_format: str) -> None:
    """The tensor is the file with its length in front; only the header is read, for the transform."""
    model = spec("TYPE_STRING", [1], square="64")
    data = file(np.zeros((50, 100, 3), np.uint8), image_format)
    with open_buffer(inline) as buffer:
        transform = fill_input(data, model, LIMITS, unlimited, buffer)

        assert buffer.tensor.tobytes() == len(data).to_bytes(4, "little") + data
    assert transform == ImageTransform(0, 16, 64, 32, 100, 50)


async def test_a_file_that_is_turned_has_its_upright_size(inline: Transport) -> None:
    """The model that decodes the file applies the EXIF orientation, too."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file(np.zeros((50, 100, 3), np.uint8), "JPEG", exif=exif)
    with open_buffer(inline) as buffer:
        transform = fill_input(data, spec("TYPE_STRING", [1], square="64"), LIMITS, unlimited, buffer)

    assert (transform.image_width, transform.image_height) == (50, 100)


@pytest.mark.parametrize(("more", "is_shared"), [(0, True), (1, False)])
async def test_a_file_lies_in_a_slot_if_it_fits(world: World, more: int, is_shared: bool) -> None:  # noqa: FBT001
    """A file of exactly the slot's size, with its length, fits; a larger one has memory of its own."""
    model = spec("TYPE_STRING", [1], square="64")
    await world.transport.prepare(model.image_bytes)
    data = file(PIXELS)
    data += bytes(model.image_bytes - 4 - len(data) + more)
    with open_buffer(world.transport) as buffer:
        fill_input(data, model, LIMITS, unlimited, buffer)

        assert (buffer.slot is not None) is is_shared
        assert buffer.tensor.tobytes() == len(data).to_bytes(4, "little") + data
    assert world.free_slots(model.image_bytes) == SLOTS


@pytest.mark.parametrize(("data_type", "dims"), [("TYPE_UINT8", [32, 32, 3]), ("TYPE_FP32", [3, 32, 32]), ("TYPE_STRING", [1])])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"%PDF-1.7", UnsupportedFormat),
        (b"", UnsupportedFormat),
        (file(np.zeros((1001, 1000, 3), np.uint8)), ImageTooLarge),
        (file(np.zeros((101, 1, 3), np.uint8)), InvalidImageDimensions),
        (file(PIXELS, "PNG")[:20], InvalidImage),
    ],
    ids=["no image", "empty", "too large", "too narrow", "no header"],
)
async def test_a_rejected_image_takes_no_memory(
    world: World, data_type: str, dims: list[int], data: bytes, expected: type[GatewayError]
) -> None:
    """The header is checked before there is a tensor, for every input format."""
    model = spec(data_type, dims, square="32")
    await world.transport.prepare(model.image_bytes)
    with open_buffer(world.transport) as buffer:
        with pytest.raises(expected):
            fill_input(data, model, LIMITS, unlimited, buffer)
        assert buffer.slot is None
        assert buffer.tensor.nbytes == 0
        assert world.free_slots(model.image_bytes) == SLOTS


@pytest.mark.parametrize(("data_type", "dims"), [("TYPE_UINT8", [32, 32, 3]), ("TYPE_FP32", [3, 32, 32])])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
async def test_an_image_that_breaks_while_it_is_decoded_gives_its_slot_back(
    world: World, data_type: str, dims: list[int], image_format: str
) -> None:
    model = spec(data_type, dims)
    await world.transport.prepare(model.image_bytes)
    noise = np.random.default_rng(6).integers(0, 256, (64, 64, 3), np.uint8)
    data = file(noise, image_format)
    with open_buffer(world.transport) as buffer:
        with pytest.raises(InvalidImage):
            fill_input(data[: len(data) // 2], model, LIMITS, unlimited, buffer)
        assert buffer.slot is not None

    assert world.free_slots(model.image_bytes) == SLOTS


async def test_a_broken_file_is_left_to_the_model_that_decodes_it(inline: Transport) -> None:
    """The gateway reads only the header of such a file."""
    data = file(np.random.default_rng(6).integers(0, 256, (64, 64, 3), np.uint8), "PNG")[:2000]
    with open_buffer(inline) as buffer:
        fill_input(data, spec("TYPE_STRING", [1], square="64"), LIMITS, unlimited, buffer)

        assert buffer.tensor.nbytes == 2004


@pytest.mark.parametrize(("data_type", "dims"), [("TYPE_FP32", [3, 1024, 1024]), ("TYPE_UINT8", [3, 1024, 1024])])
async def test_a_rejected_image_needs_no_scratch_memory(inline: Transport, data_type: str, dims: list[int]) -> None:
    """The canvas that is converted to the tensor is allocated once the header is accepted, as the tensor is."""
    model = spec(data_type, dims)
    canvas_bytes = 1024 * 1024 * 3

    def peak(data: bytes) -> int:
        tracemalloc.start()
        try:
            with open_buffer(inline) as buffer:
                fill_input(data, model, LIMITS, unlimited, buffer)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return peaks[-1]

    peaks: list[int] = []
    assert peak(file(PIXELS)) > canvas_bytes + model.image_bytes
    for data in (b"%PDF-1.7", file(PIXELS, "PNG")[:20], file(np.zeros((101, 1, 3), np.uint8))):
        with pytest.raises(GatewayError):
            peak(data)

    assert max(peaks[1:]) < canvas_bytes / 3
