"""Image libraries with nothing around them."""

import numpy as np
from numpy.typing import NDArray

from bench.contestants.processing import letterbox
from bench.experiments.candidates.libraries import opencv_steps, pillow_steps
from bench.experiments.candidates.registry import Step
from tests.support import sample_image

LIBRARIES = [opencv_steps, pillow_steps]


def run(steps: dict[str, Step], image: bytes) -> NDArray[np.uint8]:
    value = image
    for step in steps.values():
        value = step(value)
    canvas: NDArray[np.uint8] = np.asarray(value)
    return canvas


def test_libraries_agree() -> None:
    image = sample_image("chelsea.jpg")
    canvases = [letterbox(image).canvas.astype(int), *(run(prepare(), image).astype(int) for prepare in LIBRARIES)]

    for canvas in canvases[1:]:
        assert np.abs(canvas - canvases[0]).mean() < 2
