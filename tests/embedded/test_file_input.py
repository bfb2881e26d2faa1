"""Files become inside Triton the pixels that they become in the gateway."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.embedded.file_input import FileInput
from app.errors import UnsupportedModel
from app.imaging.fit import Letterbox
from tests.imaging.samples import FORMATS, PIXELS, draw, encode, exif_of, store
from tests.model.configs import FILE, SIX_COLUMNS, config, table


def takes_files(**parameters: str) -> dict[str, Any]:
    return config(SIX_COLUMNS, table(1, name="decoded", data_type="TYPE_INT32"), image=FILE, batch=4, **parameters)


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_are_those_of_the_gateway(image_format: str) -> None:
    file = encode(Image.fromarray(store(PIXELS, 6)), image_format, exif=exif_of(6))
    pixels, note = FileInput(takes_files(square="64")).draw([file])
    expected = np.empty((64, 64, 3), np.uint8)
    draw(file, Letterbox((64, 64), "center", enlarge=True, pad=114), expected)
    np.testing.assert_array_equal(pixels[0], expected)
    np.testing.assert_array_equal(note["decoded"], np.array([[1]], np.int32))


def test_parameters_are_those_of_the_config() -> None:
    """The image lies where the gateway expects it when it maps boxes back."""
    file = encode(Image.fromarray(PIXELS), "PNG")
    pixels, _ = FileInput(takes_files(square="64", placement="top_left", enlarge="false", pad="7")).draw([file])
    np.testing.assert_array_equal(pixels[0, :16, :32], PIXELS)
    assert (pixels[0, 16:] == 7).all()
    assert (pixels[0, :, 32:] == 7).all()
    with pytest.raises(UnsupportedModel, match="square"):
        FileInput(takes_files())
