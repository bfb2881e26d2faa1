"""The mask of an object, and the ways to encode it. Needs no OpenCV, without which `doctor` must start."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MaskFormat = Literal["polygon", "rle", "png", "none"]


class Mask(NamedTuple):
    """The mask of an object."""

    parts: list[NDArray[np.float32]]
    """Polygons (m, 2) x y of the outer contours, in pixels of the image; the last vertex is joined to the first."""
    encoded: dict[str, Any] | bytes | None = None
    """COCO's RLE at the size of the image, `{"size": [height, width], "counts": ...}`; a PNG of the object's region; or neither."""
    offset: tuple[int, int] = (0, 0)
    """Column and row of the image at which the PNG begins."""
