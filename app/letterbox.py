"""A picture into the model's frame, and boxes back out of it.

Both directions live here so that they agree: the way back uses the rounded size the picture really
got, per axis, never the unrounded scale.
"""

from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

# The pool of decoding threads is the parallelism; more threads inside would only queue for the same cores.
cv2.setNumThreads(1)


class Placement(NamedTuple):
    """Where a picture of `picture_width` x `picture_height` lies in the frame, all in pixels."""

    left: int
    top: int
    width: int
    height: int
    picture_width: int
    picture_height: int

    @property
    def decode_size(self) -> tuple[int, int]:
        """Width and height in pixels that a picture is needed at, where its format can be decoded smaller than it is.

        That is faster, but averages; from four times the size here on, it no longer shows in the boxes (README, Decisions).
        """
        return 4 * self.width, 4 * self.height

    def to_picture(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map boxes (n, 4) x1 y1 x2 y2 from pixels of the frame to pixels of the picture, clipped to it."""
        offset, placed = np.array([[self.left, self.top] * 2, [self.width, self.height] * 2], np.float32)
        inside: NDArray[np.float32] = np.minimum(np.maximum(boxes - offset, 0), placed)  # np.clip, without its detours
        return inside * np.array([self.picture_width / self.width, self.picture_height / self.height] * 2, np.float32)


def place(picture: tuple[int, int], frame: tuple[int, int], *, centred: bool, enlarge: bool) -> Placement:
    """Fit a picture into a frame, its proportions kept.

    Args:
        picture: Width and height, pixels.
        frame: Width and height, pixels.
        centred: In the middle, else at the top left.
        enlarge: Let small pictures grow to the frame.

    The rounding is that of the detectors' own code, so that boxes agree to the pixel: Ultralytics, which centres,
    rounds to the nearest; YOLOX, which does not, cuts off.
    Source: LetterBox in ultralytics/data/augment.py; preproc in yolox/data/data_augment.py.
    """
    scale = min(frame[0] / picture[0], frame[1] / picture[1])
    if not enlarge:
        scale = min(scale, 1.0)
    whole = round if centred else int
    width, height = (max(1, min(whole(side * scale), limit)) for side, limit in zip(picture, frame, strict=True))
    left, top = (round((outer - inner) / 2 - 0.1) if centred else 0 for outer, inner in ((frame[0], width), (frame[1], height)))
    return Placement(left, top, width, height, *picture)


def area(placement: Placement, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cut out of a frame (height, width, 3) the view that the picture will cover."""
    return frame[placement.top : placement.top + placement.height, placement.left : placement.left + placement.width]


def draw(picture: NDArray[np.uint8], placement: Placement, pad: int, frame: NDArray[np.uint8]) -> None:
    """Resize the picture into its area of the frame, and write `pad` around it.

    The interpolation is bilinear between the four nearest pixels, as the detectors were trained; Pillow's `resize`
    averages when it shrinks, which moves scores and boxes.

    Args:
        picture: UINT8 (height, width, 3) RGB, upright; it may be that area already.
        placement: Of the picture in the frame.
        pad: Value of every byte around it.
        frame: UINT8 (height, width, 3) RGB, written to.
    """
    view = area(placement, frame)
    frame[: placement.top] = pad
    frame[placement.top + placement.height :] = pad
    frame[placement.top : placement.top + placement.height, : placement.left] = pad
    frame[placement.top : placement.top + placement.height, placement.left + placement.width :] = pad
    if np.may_share_memory(picture, view):
        return
    if picture.shape == view.shape:
        view[:] = picture
    else:
        cv2.resize(picture, (placement.width, placement.height), dst=view, interpolation=cv2.INTER_LINEAR)
