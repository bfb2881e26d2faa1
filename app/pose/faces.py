"""The quality of detected faces."""

import numpy as np
from numpy.typing import NDArray

_EYES = 53.0
"""Distance of the eyes in the input of the model that describes faces, pixels: one that is smaller lacks detail."""


def rate_faces(keypoints: NDArray[np.float32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return for each face how suitable it is for telling whose it is, 0 to 1.

    The quality is a product: the score, the detail (1 if the eyes are at least 53 pixels apart), and how far the face looks
    towards the camera (1 if the nose is halfway between the eyes, 0 if it is beside them). It does not tell a blurred face.
    The keypoints (n, 5, 2 or more) are x y in pixels of the image: left and right eye, nose, corners of the mouth.
    """
    left, right, nose = keypoints[:, 0, :2], keypoints[:, 1, :2], keypoints[:, 2, :2]
    eyes = right - left
    length = np.maximum(np.linalg.norm(eyes, axis=1), 1e-3)
    place = ((nose - left) * eyes).sum(axis=1) / length**2
    frontal = np.clip(2 * np.minimum(place, 1 - place), 0, 1)
    quality: NDArray[np.float32] = (scores * np.minimum(1, length / _EYES) * frontal).astype(np.float32)
    return quality
