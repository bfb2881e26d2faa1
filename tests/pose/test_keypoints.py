"""Keypoints in pixels of the image."""

import numpy as np

from app.imaging.transform import ImageTransform
from app.pose.keypoints import read_keypoints


def test_keypoints_are_mapped_to_the_image_and_clipped() -> None:
    """A picture of 200 x 100 lies in the middle of an input of 64 x 64; the second point is in the padding above it."""
    features = np.array([[32, 32, 0.5, 16, 2, 1.0004], [64, 48, 0, 70, 70, 0.25]], np.float32)

    points = read_keypoints(features, 2, ImageTransform(0, 16, 64, 32, 200, 100))

    assert points.tolist() == [[[100, 50, 0.5], [50, 0, 1]], [[200, 100, 0], [200, 100, 0.25]]]


def test_keypoints_may_have_no_visibility() -> None:
    points = read_keypoints(np.array([[8, 4, 2, 1]], np.float32), 2, ImageTransform(0, 0, 16, 16, 32, 32))

    assert points.tolist() == [[[16, 8], [4, 2]]]
