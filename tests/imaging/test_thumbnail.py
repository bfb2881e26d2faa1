"""Small pictures of an image and of its parts."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from app.imaging.thumbnail import to_thumbnail

PIXELS = np.full((100, 400, 3), (0, 0, 255), np.uint8)
PIXELS[:, :200] = (255, 0, 0)


@pytest.mark.parametrize(
    ("box", "size"),
    [((0, 0, 1, 1), (200, 50)), ((0.5, 0, 0.75, 1), (100, 100)), ((1, 1, 1, 1), (1, 1)), ((0.6, 0.5, 0.6, 0.5), (1, 1))],
)
def test_a_part_is_shrunk_to_its_longer_side_but_never_enlarged(box: tuple[float, ...], size: tuple[int, int]) -> None:
    picture = Image.open(BytesIO(to_thumbnail(PIXELS, 200, box)))
    assert (picture.format, picture.size) == ("JPEG", size)
    red, _, blue = picture.getpixel((size[0] - 1, size[1] - 1))  # type: ignore[misc]  # of RGB
    assert (blue > 200, red < 50) == (True, True)
