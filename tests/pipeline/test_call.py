"""Questions about images."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.detection.nms import Candidates
from app.errors import InvalidModelOutput
from app.imaging.fit import fit_for
from app.imaging.transform import ImageTransform
from app.model.heads import DetectionHead, OutputFormat
from app.model.spec import from_triton_config
from app.pipeline import call, results
from app.resilience.deadline import Deadline
from app.triton.messages import InferResult
from tests.detection.test_select import crowds

TRANSFORM = ImageTransform(0, 0, 32, 32, 32, 32)
CONFIG = {
    "name": "m",
    "max_batch_size": 1,
    "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
    "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [300, 6]}],
}


def ask(rows: object, options: call.DetectOptions, *, max_iou: float) -> results.Detections:
    """Ask a model for what it has found: rows of x1 y1 x2 y2 score class, after an NMS of its own if `max_iou` is below 1."""
    head = DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)
    spec = msgspec.structs.replace(from_triton_config(CONFIG, "1"), head=head)
    decoded = call.decode(spec, InferResult({"o": np.array([rows], np.float32)}, "1"), TRANSFORM)
    return options.reader(spec).read(decoded, Deadline.after(60))


@pytest.mark.parametrize(
    ("max_iou", "iou", "kept"),
    [
        (0.45, None, 1),
        (0.45, 0.8, 3),  # which is what the model leaves
        (1.0, None, 3),
        (1.0, 0.5, 2),
    ],
)
def test_overlap_gives_way_to_that_of_the_model(max_iou: float, iou: float | None, kept: int) -> None:
    """A threshold above the model's own is lowered to it; a default does not apply to a model without duplicate boxes."""
    rows = [[0, 0, 10, height, score, 0] for height, score in ((10, 0.9), (6, 0.8), (4, 0.7))]  # overlaps of 0.6, 0.4 and 0.67
    options = call.DetectOptions(None, 0.5, None, 10, iou, lowers_iou=True, default_iou=0.3)

    assert len(ask(rows, options, max_iou=max_iou).scores) == kept


@given(
    found=crowds(),
    max_iou=st.sampled_from([0.45, 1.0]),
    iou=st.none() | st.floats(0, 0.45),
    agnostic=st.booleans(),
    most=st.integers(1, 12),
    confidence=st.floats(0, 1),
    classes=st.sets(st.sampled_from("012"), min_size=1),
)
def test_each_wish_leaves_out_and_never_adds(  # noqa: PLR0913 - what is drawn
    *, found: Candidates, max_iou: float, iou: float | None, agnostic: bool, most: int, confidence: float, classes: set[str]
) -> None:
    """Fewer classes with `agnostic`, and `agnostic` for raw heads, may add boxes: what they drop suppresses nothing."""
    rows = np.column_stack([found.boxes, found.scores, found.class_ids])
    question = call.DetectOptions(None, 0.0, None, 300, iou, agnostic)

    def answer(**changes: Any) -> list[tuple[float, ...]]:  # noqa: ANN401
        boxes, scores, class_ids = ask(rows, question._replace(**changes), max_iou=max_iou)[:3]
        return [(*box, score, id_) for box, score, id_ in zip(boxes.tolist(), scores.tolist(), class_ids.tolist(), strict=True)]

    whole = answer()
    assert answer(max_detections=most) == whole[:most]
    assert answer(confidence=confidence) == [one for one in whole if one[4] >= np.float32(confidence)]
    if not agnostic:
        assert answer(classes=sorted(classes)) == [one for one in whole if str(one[5]) in classes]
    assert {*whole} <= {*answer(iou=None, agnostic=False)}


@pytest.mark.parametrize("shape", [(736, 768), (768, 736)])
def test_map_of_text_has_the_size_of_the_input(shape: tuple[int, int]) -> None:
    config = {
        "name": "m",
        "max_batch_size": 1,
        "input": [{"name": "images", "data_type": "TYPE_UINT8", "dims": [-1, -1, 3]}],
        "output": [{"name": "map", "data_type": "TYPE_UINT8", "dims": [-1, -1]}],
        "parameters": {"task": {"string_value": "text_detection"}},
    }
    spec = from_triton_config(config, "1")
    transform = fit_for(spec).fit(768, 736)
    found = np.zeros(shape, np.uint8)
    found[100:120, 100:300] = 255
    decoded = call.decode(spec, InferResult({"map": found[None]}, "1"), transform)
    options: call.TaskOptions[results.TextRegions] = call.TaskOptions("text_detection", None)
    read = options.reader(spec).read
    if shape == (736, 768):
        assert len(read(decoded, Deadline.after(60)).scores) == 1
    else:
        with pytest.raises(InvalidModelOutput, match=r"m returned a map of .* for an input of 736x768"):
            read(decoded, Deadline.after(60))
