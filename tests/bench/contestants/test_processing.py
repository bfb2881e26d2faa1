"""Pre- and post-processing of the servers Nereid is measured against."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from bench.contestants.processing import Letterboxed, describe, letterbox, normalize


def encode(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def test_an_image_lies_in_the_middle_of_the_canvas() -> None:
    """It is scaled to the side of the canvas; the rest is grey."""
    image = letterbox(encode(320, 160, (10, 20, 30)))

    assert image[1:] == (2.0, 0, 160, 320, 160)
    assert image.canvas.shape == (640, 640, 3)
    assert (image.canvas[:160] == 114).all()
    assert (image.canvas[160:480] == (10, 20, 30)).all()
    assert (image.canvas[480:] == 114).all()


def test_normalized_pixels_are_planes_from_0_to_1() -> None:
    """The result is FP32 with a batch dimension, and contiguous as the client needs it."""
    canvas = np.zeros((640, 640, 3), np.uint8)
    canvas[3, 5] = 255, 51, 0
    planes = normalize(canvas)

    assert planes.shape == (1, 3, 640, 640)
    assert planes.dtype == np.float32
    assert planes.flags.c_contiguous
    assert planes[0, :, 3, 5].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert planes.sum() == pytest.approx(1.2)


def test_an_answer_has_corners_as_fractions_of_the_image() -> None:
    """Corners are clipped to the image; rows below the minimum confidence, and those after the count, are left out."""
    image = Letterboxed(np.zeros((640, 640, 3), np.uint8), 2.0, 0, 160, 320, 160)
    boxes = np.array([[[64, 192, 320, 320], [-10, 100, 700, 500], [0, 0, 1, 1], [0, 0, 1, 1]]], np.float32)
    scores = np.array([[0.9, 0.5, 0.2, 0.9]], np.float32)
    answer = describe(image, ["cat", "dog"], [np.array([[3]]), boxes, scores, np.array([[1, 0, 0, 0]])])

    first, second = answer["detections"]
    assert [first[key] for key in ("x1", "y1", "x2", "y2")] == pytest.approx([0.1, 0.1, 0.5, 0.5])
    assert (first["class_name"], first["class"], first["class_id"]) == ("dog", 1, 1)
    assert first["confidence"] == pytest.approx(0.9)
    assert [second[key] for key in ("x1", "y1", "x2", "y2")] == [0.0, 0.0, 1.0, 1.0]
    assert (answer["num_detections"], answer["status"], answer["image"]) == (2, "success", {"width": 320, "height": 160})
