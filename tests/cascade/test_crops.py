"""What is cropped of the objects that a step has found."""

import cv2
import numpy as np
import pytest

from app.cascade.crops import find_parts
from app.cascade.definition import Step
from app.detection.nms import Candidates
from app.imaging.patch import Patch
from app.model.spec import from_triton_config
from app.obb.boxes import enclose, to_corners
from app.pipeline.results import Detections

SPEC = from_triton_config(
    {
        "name": "plates",
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [1, 640, 640, 3]}],
        "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [1, 300, 7]}],
        "parameters": {"task": {"string_value": "obb"}},
    },
    "1",
)
SIDE = 200


@pytest.mark.parametrize("degrees", [-40, 0, 40, 95])
@pytest.mark.parametrize("is_high", [False, True])
def test_text_in_an_oriented_box_is_upright(degrees: int, *, is_high: bool) -> None:
    """Its first quarter is first: at the left, or in a line that runs downwards above. A box of a model may be higher than wide."""
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    level = np.where(x < SIDE // 2, 255, 0).astype(np.uint8)
    turn = cv2.getRotationMatrix2D((SIDE / 2, SIDE / 2), -degrees, 1)
    colours = np.stack([level, 255 * (y < SIDE // 2).astype(np.uint8), level], axis=-1)
    image = cv2.warpAffine(colours, turn, (SIDE, SIDE)).astype(np.uint8)
    sides = np.array([20, 120] if is_high else [120, 20]) / 2
    box = np.concatenate([SIDE / 2 - sides, SIDE / 2 + sides]).astype(np.float32)
    angle = np.deg2rad(np.float32(degrees - 90 * is_high))
    score, class_id = np.ones(1, np.float32), np.zeros(1, np.int32)
    corners = to_corners(Candidates(box[None], score, class_id, np.array([[angle]], np.float32)))
    found = Detections(enclose(corners), score, class_id, SIDE, SIDE, SPEC, "1", corners=corners)

    step = Step(model="reads", of="plates", crop="corners")
    [(_, part)] = find_parts(Patch(image), [found], step, SPEC)

    assert part is not None
    pixels = part.cut(SPEC)
    assert pixels.shape[1] > 4 * pixels.shape[0]
    assert pixels[5, 15].min() > 200
    assert pixels[-5, -15].max() < 50
