"""The rectangles that images get, instead of a square, as the input of a network whose height and width are dynamic."""

from math import ceil

# Of the longer side to the shorter one, as cameras have them.
_RATIOS = (16 / 9, 3 / 2, 4 / 3)


def rectangles(side: int, stride: int) -> tuple[tuple[int, int], ...]:
    """Return width and height of the rectangles in a square of this side, in pixels, the smallest first."""
    # As LetterBox pads such an image with `auto` in ultralytics/data/augment.py.
    shorter = {ceil(round(side / ratio) / stride) * stride for ratio in _RATIOS}
    return tuple(shape for short in sorted(shorter) if short < side for shape in ((side, short), (short, side)))
