"""Answers of the servers Nereid is measured against."""

import numpy as np
import pytest
from PIL import Image

from bench.contestants.processing import Letterboxed, center_crop, describe, describe_classes
from tests.imaging.samples import encode


def test_an_answer_has_corners_as_fractions_of_the_image() -> None:
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


def test_a_classifier_gets_the_middle_and_answers_its_five_best_classes() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (256, 400, 3), np.uint8)
    crop = center_crop(encode(Image.fromarray(pixels), "PNG"))
    answer = describe_classes(list("abcdef"), np.array([[0.1, 0.05, 0.4, 0.2, 0.01, 0.24]], np.float32))

    assert np.array_equal(crop, pixels[16:240, 88:312])
    assert [one["class_name"] for one in answer["classifications"]] == ["c", "f", "d", "a", "b"]
    assert answer["classifications"][0]["confidence"] == pytest.approx(0.4)
