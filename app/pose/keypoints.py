"""Keypoints in pixels of the image."""

import numpy as np
from numpy.typing import NDArray

from app.imaging.transform import ImageTransform


def read_keypoints(features: NDArray[np.float32], keypoints: int, transform: ImageTransform) -> NDArray[np.float32]:
    """Return keypoints (n, keypoints, 2 or 3), from features (n, keypoints * values) in pixels of the model's input.

    x and y are in pixels of the image, clipped to it; a third value is the visibility, 0 to 1.
    """
    points = features.reshape(len(features), keypoints, features.shape[1] // keypoints).copy()
    size = np.array([transform.image_width, transform.image_height], np.float32)
    points[..., :2] = np.clip(transform.points_to_image(points[..., :2]), 0, size)
    points[..., 2:] = np.clip(points[..., 2:], 0, 1)
    return points
