"""Decoding the files of requests inside Triton: the same pixels as in the gateway."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.embedded.file_input import FileInput
from app.errors import UnsupportedModel
from app.imaging.fit import Letterbox
from tests.imaging.samples import FORMATS, PIXELS, draw, encode, exif_of, store

SIDE = 64
IMAGE = Image.fromarray(PIXELS)


def config(**parameters: str) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "file", "data_type": "TYPE_STRING", "dims": ["1"]}],
        "output": [
            {"name": "output0", "data_type": "TYPE_FP32", "dims": ["300", "6"]},
            {"name": "decoded", "data_type": "TYPE_INT32", "dims": ["1"]},
        ],
        "parameters": {key: {"string_value": value} for key, value in ({"square": str(SIDE)} | parameters).items()},
    }


def drawn_by_the_gateway(file: bytes, letterbox: Letterbox) -> NDArray[np.uint8]:
    pixels = np.empty((SIDE, SIDE, 3), np.uint8)
    draw(file, letterbox, pixels)
    return pixels


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_are_those_of_the_gateway(image_format: str) -> None:
    file = encode(Image.fromarray(store(PIXELS, 6)), image_format, exif=exif_of(6))
    pixels, note = FileInput(config()).draw([file])

    np.testing.assert_array_equal(pixels[0], drawn_by_the_gateway(file, Letterbox((SIDE, SIDE), "center", enlarge=True, pad=114)))
    np.testing.assert_array_equal(note["decoded"], np.array([[1]], np.int32))


def test_parameters_are_those_of_the_config() -> None:
    """The image lies where the gateway expects it when it maps boxes back."""
    file = encode(IMAGE, "PNG")
    pixels, _ = FileInput(config(placement="top_left", enlarge="false", pad="7")).draw([file])

    np.testing.assert_array_equal(pixels[0, :16, :32], PIXELS)
    assert (pixels[0, 16:] == 7).all()
    assert (pixels[0, :, 32:] == 7).all()


@pytest.mark.parametrize("broken", [b"", b"text", encode(IMAGE, "PNG")[:-40], encode(IMAGE, "JPEG")[:200]])
def test_file_that_cannot_be_decoded_harms_no_other(broken: bytes) -> None:
    good = encode(IMAGE, "JPEG")
    reader = FileInput(config())
    pixels, note = reader.draw([good, broken, good])

    assert note["decoded"].tolist() == [[1], [0], [1]]
    assert (pixels[1] == 114).all()
    np.testing.assert_array_equal(pixels[[0, 2]], reader.draw([good, good])[0])


def test_model_that_the_gateway_could_not_use_is_an_error() -> None:
    unclear = config()
    del unclear["parameters"]["square"]

    with pytest.raises(UnsupportedModel, match="square"):
        FileInput(unclear)
