"""A part of a decoded image, cut out for a model: a box, text between four corners, or an object aligned by its landmarks."""

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.resilience.lease import Lease

# A cut that is so many times as high as wide is a line that runs vertically.
_VERTICAL = 1.5
# Of what is straightened: as large as a page of RapidOCR. Models that read lines need a hundredth of it.
_MAX_PIXELS = 2000 * 2000


class Patch(NamedTuple):
    """The whole of a decoded image, or a part of it."""

    image: NDArray[np.uint8]
    """The whole image, UINT8 (height, width, 3) RGB, upright."""
    box: tuple[int, int, int, int] | None = None
    """x1 y1 x2 y2 in pixels, within the image, not empty."""
    corners: NDArray[np.float32] | None = None
    """(4, 2) x y in pixels, clockwise from the top left of the text."""
    landmarks: NDArray[np.float32] | None = None
    """(landmarks, 2) x y in pixels; as many as the model that is asked has in `ModelSpec.landmarks`."""
    half_turn: bool = False
    """Whether the part is upside down."""
    memory: Lease | None = None
    """Holds the memory of the image; to be kept as long as a thread reads it."""

    def cut(self, spec: ModelSpec) -> NDArray[np.uint8]:
        """Return the pixels (height, width, 3) of the part, for this model; a view if possible. Call this in a thread."""
        if self.corners is not None:
            pixels = _straighten(self.image, self.corners)
        elif self.landmarks is not None:
            pixels = _align(self.image, self.landmarks, spec)
        elif self.box is not None:
            left, top, right, bottom = self.box
            pixels = self.image[top:bottom, left:right]
        else:
            pixels = self.image
        return np.ascontiguousarray(pixels[::-1, ::-1]) if self.half_turn else pixels


def _straighten(image: NDArray[np.uint8], corners: NDArray[np.float32]) -> NDArray[np.uint8]:
    # A vertical line is turned by 90 degrees. Source: get_rotate_crop_image in rapidocr/utils/process_img.py.
    top, right, bottom, left = (float(np.linalg.norm(corners[n] - corners[(n + 1) % 4])) for n in range(4))
    longest = math.hypot(*image.shape[:2])  # of what is beyond the image there are no pixels, however large the model says it is
    sides = [min(max(pair), longest) for pair in ((top, bottom), (left, right))]
    scale = min(1.0, math.sqrt(_MAX_PIXELS / max(math.prod(sides), 1.0)))
    width, height = (max(1, int(side * scale)) for side in sides)
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    matrix = cv2.getPerspectiveTransform(np.ascontiguousarray(corners, np.float32), target)
    pixels = cv2.warpPerspective(image, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE, flags=cv2.INTER_CUBIC)
    return np.ascontiguousarray(np.rot90(pixels)) if height >= _VERTICAL * width else pixels  # type: ignore[return-value]


def _align(image: NDArray[np.uint8], landmarks: NDArray[np.float32], spec: ModelSpec) -> NDArray[np.uint8]:
    # The transform turns, scales equally and moves (least squares; Umeyama 1991).
    wanted = np.array(spec.landmarks, np.float64).reshape(-1, 2) * spec.input_size
    points = landmarks.astype(np.float64)
    source, target = points - points.mean(axis=0), wanted - wanted.mean(axis=0)
    norm = max((source**2).sum(), 1e-6)
    cosine = (source * target).sum() / norm
    sine = (source[:, 0] * target[:, 1] - source[:, 1] * target[:, 0]).sum() / norm
    turn = np.array([[cosine, -sine], [sine, cosine]])
    matrix = np.column_stack([turn, wanted.mean(axis=0) - turn @ points.mean(axis=0)])
    return cv2.warpAffine(image, matrix, spec.input_size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)  # type: ignore[return-value]
