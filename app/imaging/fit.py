"""The ways to fit an image into the model's input, by name."""

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from app.imaging.fill import CenterCrop, Stretch
from app.imaging.letterbox import Letterbox
from app.imaging.resize import Interpolation
from app.imaging.transform import ImageTransform


class Fit(Protocol):
    """A way to fit images."""

    @property
    def canvas_size(self) -> tuple[int, int]:
        """Width and height, pixels."""

    def fit(self, width: int, height: int) -> ImageTransform:
        """Place an image of this size, pixels."""

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Draw an image, UINT8 (height, width, 3) RGB upright, on a canvas, every byte of which is written."""

    def draw_bytes(self, decoded_size: tuple[int, int], transform: ImageTransform) -> int:
        """Return how much memory `draw` takes beside its arguments, bytes, for pixels of this width and height."""


class FitRules(Protocol):
    """What a model says of the way."""

    @property
    def resize(self) -> Literal["letterbox", "center_crop", "stretch"]:
        """The way."""

    @property
    def input_size(self) -> tuple[int, int]:
        """Width and height of the canvas, pixels."""

    @property
    def placement(self) -> Literal["center", "top_left"]:
        """Where a letterbox places the image."""

    @property
    def enlarge(self) -> bool:
        """Whether a letterbox enlarges small images."""

    @property
    def pad(self) -> int:
        """The value around the image in a letterbox."""

    @property
    def crop(self) -> float:
        """The part of the shorter side that a centre crop keeps."""

    @property
    def interpolation(self) -> Interpolation:
        """Between which pixels."""


_FITS: dict[str, Callable[[FitRules], Fit]] = {
    "letterbox": lambda r: Letterbox(r.input_size, r.placement, r.enlarge, r.pad, r.interpolation),
    "center_crop": lambda r: CenterCrop(r.input_size, r.crop, r.interpolation),
    "stretch": lambda r: Stretch(r.input_size, r.interpolation),
}


def fit_for(rules: FitRules) -> Fit:
    """Make what fits images as a model wants it."""
    return _FITS[rules.resize](rules)
