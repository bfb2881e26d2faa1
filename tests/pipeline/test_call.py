"""Questions about images."""

from typing import get_args
from unittest.mock import Mock

import pytest

from app.detection.select import Suppression
from app.model.heads import TASKS, DetectionHead, Head, OutputFormat
from app.pipeline import call

HEADS = get_args(Head)


def test_tasks_and_heads_belong_together() -> None:
    assert [head.task for head in HEADS] == list(TASKS)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.task))
def test_each_task_has_a_trivial_question(head: type[Head]) -> None:
    """Without it, a model of the task would fail in its warm-up and in probes."""
    question = call._TRIVIAL[head.task]("mine")  # noqa: SLF001 - no model of a new task exists for the tests of a public function

    assert (question.model, question.task) == ("mine", head.task)


def head(output_format: OutputFormat, max_iou: float) -> DetectionHead:
    return DetectionHead(output_format=output_format, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)


RAW, SUPPRESSED = head(OutputFormat.YOLO_HEAD, 1.0), head(OutputFormat.END_TO_END, 0.45)
ONCE = head(OutputFormat.SIX_COLUMNS, 1.0)


@pytest.mark.parametrize(
    ("asked", "iou", "expected"),
    [
        (RAW, None, 0.3),
        (SUPPRESSED, None, 0.3),
        (ONCE, None, None),
        (RAW, 0.8, 0.8),
        (SUPPRESSED, 0.8, None),  # which is what the model leaves
        (ONCE, 0.8, 0.8),
    ],
)
def test_an_overlap_can_give_way_to_the_model(asked: DetectionHead, iou: float | None, expected: float | None) -> None:
    """It is lowered to what the model leaves; and what is only a default does not concern a model that finds each object once."""
    spec = Mock(labels=(), expect_head=lambda _: asked)
    options = call.DetectOptions(None, 0.5, None, 10, iou, lowers_iou=True, default_iou=0.3)
    wanted = options.reader(spec).read.args[1]  # type: ignore[attr-defined]  # a partial

    assert wanted.keywords["suppression"] == (expected and Suppression(expected, is_agnostic=False))
