"""The golden picture, and what a model finds in it: its values tell a Triton that answers wrongly from one that is well."""

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

SAMPLE = "golden_sample"
"""Output of the detectors that `add` composes: some raw values, for which only the golden picture is asked."""
ROWS = 5
"""Number of raw values of a detector without anchors: the mean of its rows, x1 y1 x2 y2, and the share of rows with a score."""
MEANS = 2
"""Number of the last raw values of a detector with anchors, which are means."""
MAX_BOXES = 20
MIN_SCORE = 0.15
"""Of the boxes that are kept. Of those with twice this score more than half must be found again."""
# Wide enough for FP16 and INT8.
_MIN_IOU, _SCORE_TOLERANCE = 0.8, 0.15
_SAMPLE_TOLERANCE = 0.4
# Smaller values than this are noise.
_NOISE = 0.01
# Where fewer rows have a score, one more or less changes the mean.
_MIN_SHARE = 0.9


class Golden(Struct, frozen=True):
    """What a model finds in the golden picture."""

    sample: tuple[float, ...] = ()
    """Some raw values, or the last ones of them; empty if there are none, or none that are always the same."""
    boxes: tuple[tuple[float, float, float, float, float, int], ...] = ()
    """x1 y1 x2 y2 in pixels of the input, score and class of the best boxes."""

    def difference(self, answer: "Golden") -> str:
        """Return in what an answer differs from this one, and so is wrong; empty if both are alike."""
        is_mean = len(self.sample) != ROWS or self.sample[-1] >= _MIN_SHARE
        if self.sample and answer.sample and is_mean:
            one, other = np.array(self.sample), np.array(answer.sample[-len(self.sample) :])
            scale = max(float(np.linalg.norm(one)), _NOISE * len(one) ** 0.5)
            if one.shape != other.shape or not np.linalg.norm(one - other) <= _SAMPLE_TOLERANCE * scale:  # so that NaN differs
                return "other raw values"
        for what, boxes, others in (("missing", self.boxes, answer.boxes), ("unexpected", answer.boxes, self.boxes)):
            sure = [box for box in boxes if box[4] >= 2 * MIN_SCORE + _SCORE_TOLERANCE * (what == "unexpected")]
            if 2 * sum(_is_among(box, others) for box in sure) <= len(sure) > 0:
                return f"{what} boxes"
        return ""

    @property
    def is_zero(self) -> bool:
        """Whether there are raw values, and nothing else than zeros."""
        return bool(self.sample) and not any(self.sample) and not self.boxes

    def keep(self, answer: "Golden") -> "Golden":
        """Return an answer with as many raw values as this has: the others may change with each batch."""
        return Golden(answer.sample[len(answer.sample) - len(self.sample) :], answer.boxes)


def _is_among(box: ArrayLike, others: ArrayLike) -> bool:
    one, rest = np.array(box, np.float64), np.reshape(np.array(others, np.float64), (-1, 6))
    sides = np.minimum(one[2:4], rest[:, 2:4]) - np.maximum(one[:2], rest[:, :2])
    shared = np.maximum(sides, 0).prod(1)
    union = (one[2:4] - one[:2]).prod() + (rest[:, 2:4] - rest[:, :2]).prod(1) - shared
    alike = (shared >= _MIN_IOU * union) & (abs(rest[:, 4] - one[4]) <= _SCORE_TOLERANCE) & (rest[:, 5] == one[5])
    return bool(alike.any())


def picture(width: int, height: int) -> NDArray[np.uint8]:
    """Draw the golden picture, RGB (height, width, 3), in integers, so that it is the same everywhere.

    A stop sign, a ball and lines like those of a text on a gradient: what many models find, in its usual colours.
    """
    y, x = (np.arange(side, dtype=np.int32) * 1024 // side for side in (height, width))
    y = y[:, None]
    image = np.empty((height, width, 3), np.uint8)
    image[..., 0], image[..., 1], image[..., 2] = 90 + x // 12, 130 + y // 14, 200 - y // 8
    dx, dy = abs(x - 520), abs(y - 280)
    for side, colour in ((150, (245, 245, 245)), (140, (200, 16, 30))):
        image[(dx < side) & (dy < side) & (dx + dy < side * 99 // 70)] = colour
    image[(dx < 10) & (y >= 430)] = 120, 120, 120  # noqa: PLR2004 - a pole
    image[(x - 800) ** 2 + (y - 800) ** 2 < 130**2] = 245, 130, 20
    for top, height_of_line, left, letters in ((245, 70, 420, 4), (620, 40, 60, 10), (720, 40, 60, 8)):
        column, step = (x - left) * 4 // height_of_line, 3
        is_letter = (column >= 0) & (column < letters * step) & (column % step < 2)  # noqa: PLR2004 - two of three columns
        image[is_letter & (y >= top) & (y < top + height_of_line)] = 250, 250, 250
    return image
