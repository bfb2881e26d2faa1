"""Questions about images."""

from typing import get_args

import msgspec
import numpy as np
import pytest

from app.imaging.transform import ImageTransform
from app.model.heads import DetectionHead, Head, OutputFormat
from app.model.spec import from_triton_config
from app.pipeline import call
from app.triton.messages import InferResult

HEADS = get_args(Head)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.task))
def test_each_task_has_a_trivial_question(head: type[Head]) -> None:
    """Without it, a model of the task would fail in its warm-up and in probes."""
    question = call._TRIVIAL[head.task]("mine")  # noqa: SLF001 - no model of a new task exists for the tests of a public function

    assert (question.model, question.task) == ("mine", head.task)


@pytest.mark.parametrize(
    ("max_iou", "iou", "kept"),
    [
        (0.45, None, 1),
        (0.45, 0.8, 3),  # which is what the model leaves
        (1.0, None, 3),
        (1.0, 0.5, 2),
    ],
)
def test_an_overlap_can_give_way_to_the_model(max_iou: float, iou: float | None, kept: int) -> None:
    """A threshold above the model's own is lowered to it; a default does not apply to a model without duplicate boxes."""
    head = DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)
    config = {
        "name": "m",
        "max_batch_size": 1,
        "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
        "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [300, 6]}],
    }
    spec = msgspec.structs.replace(from_triton_config(config, "1"), head=head)
    rows = [[0, 0, 10, height, score, 0] for height, score in ((10, 0.9), (6, 0.8), (4, 0.7))]  # overlaps of 0.6, 0.4 and 0.67
    options = call.DetectOptions(None, 0.5, None, 10, iou, lowers_iou=True, default_iou=0.3)
    answer = InferResult({"o": np.array([rows], np.float32)}, "1")

    assert len(options.reader(spec).read(answer, ImageTransform(0, 0, 32, 32, 32, 32)).scores) == kept
