"""Nereid's own functions as candidates, without a Triton; `test_stages.py` runs them with one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.imaging.fit import Letterbox
from bench.experiments.candidates.nereid import inline_steps, shared_steps
from bench.experiments.candidates.registry import Step
from tests.imaging import samples
from tests.support import sample_image

IMAGE_STEPS = ["header", "decode", "letterbox"]
BOTH = pytest.mark.parametrize("prepare", [inline_steps, shared_steps])
Prepare = Callable[[], dict[str, Step]]


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_TRITON", raising=False)


def draw(steps: dict[str, Step], image: bytes) -> NDArray[np.uint8]:
    value: Any = image
    for name in IMAGE_STEPS:
        value = steps[name](value)
    canvas: NDArray[np.uint8] = value
    return canvas


@BOTH
@pytest.mark.parametrize("name", ["chelsea.jpg", "coffee.jpg"])
def test_the_steps_draw_what_the_gateway_draws(prepare: Prepare, name: str) -> None:
    expected = np.zeros((640, 640, 3), np.uint8)
    letterbox = Letterbox((640, 640), "center", enlarge=True, pad=114)
    samples.draw(sample_image(name), letterbox, expected)

    np.testing.assert_array_equal(draw(prepare(), sample_image(name)), expected)
