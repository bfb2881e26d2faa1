"""Tensors into rows, and nonsense into errors."""

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.contract import Contract, Layout, read
from app.errors import ModelNonsense
from app.rows import read as read_rows

Outputs = dict[str, NDArray[Any]]

BASE = read(
    {
        "name": "m",
        "max_batch_size": 1,
        "input": [{"name": "images", "data_type": "TYPE_FP32", "dims": [3, 32, 64]}],
        "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [300, 6]}],
    },
    "1",
)
ANCHORS = 42
NAMES = ("count", "boxes", "scores", "classes")
BOXES = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.float32)
SCORES = np.array([0.9, 0.5, 0.1], np.float32)
CLASSES = np.array([2, 0, 1], np.int32)


def model(layout: Layout, **changes: Any) -> Contract:  # noqa: ANN401
    outputs = NAMES if layout is Layout.END_TO_END else ("o",)
    return msgspec.structs.replace(BASE, layout=layout, outputs=outputs, **changes)


def four(**changes: NDArray[Any]) -> Outputs:
    """Answer as an end-to-end model, three rows of which two count."""
    parts = {"count": np.array([2], np.int32), "boxes": BOXES, "scores": SCORES, "classes": CLASSES} | changes
    return {name: part[None] for name, part in parts.items()}


def six(*rows: list[float]) -> Outputs:
    return {"o": np.array([rows], np.float32)}


def yolo(scores: float = 0.9) -> NDArray[np.float32]:
    head = np.zeros((6, ANCHORS), np.float32)
    head[:, 3] = [10, 20, 4, 8, 0, scores]
    return head


def yolox(scores: float = 0.9) -> NDArray[np.float32]:
    head = np.zeros((ANCHORS, 7), np.float32)
    head[9] = [0.5, 0.5, 0, 0, 1, 0, scores]
    return head


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_end_to_end_is_cut_at_its_count(count: int) -> None:
    """Only the first `count` rows are detections."""
    rows = read_rows(model(Layout.END_TO_END), four(count=np.array([count])))

    np.testing.assert_array_equal(rows.boxes, BOXES[:count])
    np.testing.assert_array_equal(rows.scores, SCORES[:count])
    np.testing.assert_array_equal(rows.classes, CLASSES[:count])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.uint32, np.float32, np.float16])
def test_classes_may_be_of_any_type(kind: type) -> None:
    """Ids come out as 32-bit integers."""
    rows = read_rows(model(Layout.END_TO_END), four(classes=CLASSES.astype(kind)))

    assert rows.classes.tolist() == [2, 0]
    assert rows.classes.dtype == np.int32


def test_half_floats_are_widened() -> None:
    """Boxes and scores come out as 32-bit floats."""
    rows = read_rows(model(Layout.END_TO_END), four(boxes=BOXES.astype(np.float16), scores=SCORES.astype(np.float16)))

    assert [str(part.dtype) for part in rows] == ["float32", "float32", "int32"]
    np.testing.assert_allclose(rows.scores, [0.9, 0.5], atol=1e-3)


def test_rows_behind_the_count_may_be_anything() -> None:
    """Padding is not looked at."""
    nan = np.float32(np.nan)
    outputs = four(
        boxes=np.vstack([BOXES[:2], np.full((1, 4), nan)]), scores=np.append(SCORES[:2], nan), classes=np.array([2, 0, -1])
    )

    assert read_rows(model(Layout.END_TO_END), outputs).classes.tolist() == [2, 0]


def test_six_columns_without_their_padding() -> None:
    """Rows of a score of zero or less are padding, wherever they are."""
    outputs = six([1, 2, 3, 4, 0.9, 2], [0, 0, 0, 0, 0, 0], [5, 6, 7, 8, 0.5, 7], [0, 0, 0, 0, -1, -1])

    rows = read_rows(model(Layout.SIX_COLUMNS), outputs)

    np.testing.assert_array_equal(rows.boxes, BOXES[:2])
    np.testing.assert_array_equal(rows.scores, SCORES[:2])
    assert rows.classes.tolist() == [2, 7]


def test_yolo_head_is_decoded() -> None:
    """Centre and size become corners."""
    rows = read_rows(model(Layout.YOLO_HEAD), {"o": yolo()[None]})

    np.testing.assert_array_equal(rows.boxes, [[8, 16, 12, 24]])
    np.testing.assert_array_equal(rows.scores, SCORES[:1])
    assert rows.classes.tolist() == [1]


def test_yolox_head_is_decoded() -> None:
    """Cells of this frame become corners."""
    rows = read_rows(model(Layout.YOLOX_HEAD), {"o": yolox()[None]})

    np.testing.assert_array_equal(rows.boxes, [[8, 8, 16, 16]])
    np.testing.assert_array_equal(rows.scores, SCORES[:1])
    assert rows.classes.tolist() == [1]


def test_heads_are_suppressed_at_the_models_own_overlap() -> None:
    """`iou` of the contract decides whether two boxes are one."""
    head = np.zeros((5, 2), np.float32)
    head.T[:] = [[50, 50, 100, 100, 0.9], [75, 50, 50, 100, 0.8]]

    assert len(read_rows(model(Layout.YOLO_HEAD, iou=0.5), {"o": head[None]}).boxes) == 2
    assert len(read_rows(model(Layout.YOLO_HEAD, iou=0.4), {"o": head[None]}).boxes) == 1


@pytest.mark.parametrize("layout", Layout)
def test_empty_answer_is_no_rows(layout: Layout) -> None:
    """A picture with nothing in it is three empty arrays."""
    nothing: dict[Layout, Outputs] = {
        Layout.END_TO_END: four(count=np.array([0])),
        Layout.SIX_COLUMNS: {"o": np.zeros((1, 0, 6), np.float32)},
        Layout.YOLO_HEAD: {"o": yolo(0)[None]},
        Layout.YOLOX_HEAD: {"o": yolox(0)[None]},
    }

    rows = read_rows(model(layout), nothing[layout])

    assert (rows.boxes.shape, rows.scores.shape, rows.classes.shape) == ((0, 4), (0,), (0,))


def test_model_without_batch_dimension() -> None:
    """Its tensors are taken as they are."""
    outputs = {name: tensor[0] for name, tensor in four().items()}

    np.testing.assert_array_equal(read_rows(model(Layout.END_TO_END, batched=False), outputs).boxes, BOXES[:2])


def test_normalized_boxes_are_scaled_to_the_frame() -> None:
    """Fractions become pixels, x by the width and y by the height."""
    rows = read_rows(model(Layout.SIX_COLUMNS, normalized=True), six([0.25, 0.5, 0.5, 1, 0.9, 0]))

    np.testing.assert_array_equal(rows.boxes, [[16, 16, 32, 32]])


def test_score_a_little_above_one_is_rounding() -> None:
    """What half floats round above one is let through."""
    assert read_rows(model(Layout.SIX_COLUMNS), six([1, 2, 3, 4, 1.0005, 0])).scores.tolist() == pytest.approx([1.0005])


@pytest.mark.parametrize("layout", Layout)
def test_missing_output_is_nonsense(layout: Layout) -> None:
    """An answer without a tensor names the tensor."""
    with pytest.raises(ModelNonsense, match=f"m returned no {model(layout).outputs[0]}$"):
        read_rows(model(layout), {"other": np.zeros((1, 300, 6))})


@pytest.mark.parametrize("shape", [(), (0, 3, 6), (2, 3, 6)])
def test_other_batch_is_nonsense(shape: tuple[int, ...]) -> None:
    """One picture was asked about, one must be answered."""
    with pytest.raises(ModelNonsense, match=r"m returned o of shape .* for a batch of one"):
        read_rows(model(Layout.SIX_COLUMNS), {"o": np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout.SIX_COLUMNS, (6,)),
        (Layout.SIX_COLUMNS, (3, 7)),
        (Layout.SIX_COLUMNS, (1, 3, 6)),
        (Layout.YOLO_HEAD, (84,)),
        (Layout.YOLO_HEAD, (1, 84, 42)),
        (Layout.YOLO_HEAD, (4, 42)),
        (Layout.YOLO_HEAD, (0, 42)),
        (Layout.YOLOX_HEAD, (ANCHORS,)),
        (Layout.YOLOX_HEAD, (ANCHORS + 1, 7)),
        (Layout.YOLOX_HEAD, (ANCHORS, 5)),
        (Layout.YOLOX_HEAD, (ANCHORS, 2)),
    ],
)
def test_other_shape_is_nonsense(layout: Layout, shape: tuple[int, ...]) -> None:
    """A tensor that is not of the layout's shape is refused with its shape."""
    with pytest.raises(ModelNonsense, match="shape"):
        read_rows(model(layout), {"o": np.zeros((1, *shape), np.float32)})


@pytest.mark.parametrize(
    "changes",
    [
        {"count": np.array(2)},
        {"count": np.array([2, 2])},
        {"boxes": BOXES[:, :3]},
        {"boxes": BOXES.ravel()},
        {"scores": SCORES[:2]},
        {"scores": SCORES[:, None]},
        {"classes": CLASSES[:2]},
    ],
)
def test_four_tensors_that_do_not_fit_together_are_nonsense(changes: Outputs) -> None:
    """Boxes, scores and classes are of one length, the count is one number."""
    with pytest.raises(ModelNonsense, match="shape"):
        read_rows(model(Layout.END_TO_END), four(**changes))


@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1])
def test_count_out_of_range_is_nonsense(count: int) -> None:
    """There cannot be fewer than none nor more than there is room for."""
    with pytest.raises(ModelNonsense, match=f"a count of {count} for 3 rows"):
        read_rows(model(Layout.END_TO_END), four(count=np.array([count])))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", [Layout.END_TO_END, Layout.SIX_COLUMNS])
def test_boxes_that_are_no_numbers_are_nonsense(layout: Layout, value: float) -> None:
    """One corner that is not finite spoils the answer."""
    outputs = six([1, value, 3, 4, 0.9, 0]) | four(boxes=np.array([[1, 2, 3, 4], [1, 2, value, 4], [0, 0, 0, 0]]))

    with pytest.raises(ModelNonsense, match="m returned boxes that are not finite"):
        read_rows(model(layout), outputs)


def test_boxes_too_large_to_scale_are_nonsense() -> None:
    """Fractions that overflow on their way to pixels are refused, without a warning."""
    with pytest.raises(ModelNonsense, match="m returned boxes that are not finite"):
        read_rows(model(Layout.SIX_COLUMNS, normalized=True), six([0, 0, 3e38, 1, 0.9, 0]))


def test_boxes_beyond_a_float_are_nonsense() -> None:
    """A double that no float can hold is refused, without a warning."""
    with pytest.raises(ModelNonsense, match="m returned boxes that are not finite"):
        read_rows(model(Layout.END_TO_END), four(boxes=np.full((3, 4), 1e300)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.01, 55.0])
@pytest.mark.parametrize("layout", [Layout.END_TO_END, Layout.SIX_COLUMNS])
def test_scores_that_are_no_probability_are_nonsense(layout: Layout, value: float) -> None:
    """A score that is no number or above one spoils the answer."""
    outputs = six([1, 2, 3, 4, value, 0]) | four(scores=np.array([0.9, value, 0.1]))

    with pytest.raises(ModelNonsense, match="m returned scores outside 0 to 1"):
        read_rows(model(layout), outputs)


def test_negative_score_is_nonsense() -> None:
    """Where a count says what is padding, a negative score is none."""
    with pytest.raises(ModelNonsense, match="m returned scores outside 0 to 1"):
        read_rows(model(Layout.END_TO_END), four(scores=np.array([0.9, -0.1, 0.1])))


@pytest.mark.parametrize("head", [yolo(55), yolo(1.01)])
def test_scores_of_a_head_are_probabilities_too(head: NDArray[np.float32]) -> None:
    """Logits where scores are due are noticed."""
    with pytest.raises(ModelNonsense, match="m returned scores outside 0 to 1"):
        read_rows(model(Layout.YOLO_HEAD), {"o": head[None]})


@pytest.mark.parametrize("value", [-1, np.nan, np.inf, 1e20])
@pytest.mark.parametrize("layout", [Layout.END_TO_END, Layout.SIX_COLUMNS])
def test_class_that_is_no_id_is_nonsense(layout: Layout, value: float) -> None:
    """Negative numbers, what is no number, and what no integer holds name no class."""
    outputs = six([1, 2, 3, 4, 0.9, value]) | four(classes=np.array([0, value, 1]))

    with pytest.raises(ModelNonsense, match="m returned a negative class id"):
        read_rows(model(layout), outputs)


@pytest.mark.parametrize("value", [2**31, 2**32 + 5, 2**63 - 1])
def test_class_beyond_an_integer_is_nonsense(value: int) -> None:
    """A 64-bit id does not wrap round to another class."""
    with pytest.raises(ModelNonsense):
        read_rows(model(Layout.END_TO_END), four(classes=np.array([0, value, 1], np.int64)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("layout", "head"), [(Layout.YOLO_HEAD, yolo()), (Layout.YOLOX_HEAD, yolox())])
def test_head_that_is_not_finite_is_nonsense(layout: Layout, head: NDArray[np.float32], value: float) -> None:
    """A NaN anywhere in a head is refused before it is decoded, which could drop it unseen."""
    spoiled = head.copy()
    spoiled[-1, -1] = value

    with pytest.raises(ModelNonsense, match="m returned a head that is not finite"):
        read_rows(model(layout), {"o": spoiled[None]})


def test_yolox_size_that_overflows_is_nonsense() -> None:
    """A log size whose exponential is infinite is refused, without a warning."""
    head = yolox()
    head[9, 2] = 1000

    with pytest.raises(ModelNonsense, match="m returned boxes that are not finite"):
        read_rows(model(Layout.YOLOX_HEAD), {"o": head[None]})
