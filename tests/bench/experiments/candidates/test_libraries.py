"""Image libraries with nothing around them."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.experiments.candidates.libraries import opencv_steps, pillow_steps
from bench.experiments.candidates.registry import Step
from tests.support import sample_image

LIBRARIES = [opencv_steps, pillow_steps]
Prepare = Callable[[], dict[str, Step]]


def run(steps: dict[str, Step], image: bytes) -> NDArray[np.uint8]:
    value = image
    for step in steps.values():
        value = step(value)
    canvas: NDArray[np.uint8] = np.asarray(value)
    return canvas


@pytest.mark.parametrize("prepare", LIBRARIES)
def test_an_image_lies_in_the_middle_of_a_grey_canvas(prepare: Prepare) -> None:
    """The sample has 451 x 300 pixels, so the canvas has bars above and below."""
    canvas = run(prepare(), sample_image("chelsea.jpg"))

    assert canvas.shape == (640, 640, 3)
    assert canvas.dtype == np.uint8
    assert (canvas[:100] == 114).all()
    assert (canvas[-100:] == 114).all()
    assert canvas[320].std() > 10


def test_libraries_agree() -> None:
    """They do the same work: same place, same order of channels, and pixels that differ by rounding only."""
    canvases = [run(prepare(), sample_image("chelsea.jpg")).astype(int) for prepare in LIBRARIES]

    for canvas in canvases[1:]:
        assert np.abs(canvas - canvases[0]).mean() < 2
