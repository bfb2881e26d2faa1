"""Output tensors to candidates in every format, invalid ones to errors, and which candidates the caller wants."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE, Candidates, from_yolo, suppress
from app.detection.outputs import decode_outputs, raw_rows
from app.detection.select import Suppression, choose_best, select, to_class_ids, to_suppression
from app.errors import InvalidImage, InvalidModelOutput, InvalidParameter
from app.model.anchors import anchor_grid, count_anchors
from app.model.heads import RAW_HEADS, DetectionHead, OutputFormat
from app.model.spec import ModelSpec
from tests.model import configs
from tests.model.configs import table

Outputs = dict[str, NDArray[Any]]

BASE = configs.spec_of(image=table(3, 32, 64))
ANCHORS = 42
BOXES = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.float32)
SCORES = np.array([0.9, 0.5, 0.1], np.float32)
CLASSES = np.array([2, 0, 1], np.int32)


def spec_of(output_format: OutputFormat, *, has_normalized_boxes: bool = False, iou: float = 0.7, **changes: Any) -> ModelSpec:  # noqa: ANN401
    names = tuple(ANSWERS[output_format])
    head = DetectionHead(output_format=output_format, has_normalized_boxes=has_normalized_boxes, iou=iou, max_iou=1.0)
    parts = {"head": head, "output_names": names, "output_dtypes": (None,) * len(names)}
    return msgspec.structs.replace(BASE, **(parts | changes))


def four(**changes: NDArray[Any]) -> Outputs:
    """Answer as an end-to-end model, with three rows of which two are valid."""
    parts = {"count": np.array([2], np.int32), "boxes": BOXES, "scores": SCORES, "classes": CLASSES} | changes
    return {name: part[None] for name, part in parts.items()}


def six(*rows: list[float]) -> Outputs:
    return {"o": np.array([rows], np.float32)}


def yolo(score: float = 0.9) -> NDArray[np.float32]:
    head = np.zeros((6, ANCHORS), np.float32)
    head[:, 3] = [10, 20, 4, 8, 0, score]
    return head


def yolox(score: float = 0.9) -> NDArray[np.float32]:
    head = np.zeros((ANCHORS, 7), np.float32)
    head[9] = [0.5, 0.5, 0, 0, 1, 0, score]
    return head


def yolov5(score: float = 0.9) -> NDArray[np.float32]:
    head = np.zeros((3 * ANCHORS, 7), np.float32)
    head[9] = [10, 20, 4, 8, score, 0, 1]
    return head


def rtdetr(score: float = 0.9) -> NDArray[np.float32]:
    return np.array([[0.5, 0.5, 0.25, 0.5, 0, score], [0, 0, 0, 0, 0, 0]], np.float32)


HEADS = {
    OutputFormat.YOLO_HEAD: yolo,
    OutputFormat.YOLOV5_HEAD: yolov5,
    OutputFormat.YOLOX_HEAD: yolox,
    OutputFormat.RTDETR: rtdetr,
}
ANSWERS: dict[OutputFormat, Outputs] = {
    OutputFormat.END_TO_END: four(),
    **dict.fromkeys((OutputFormat.SIX_COLUMNS, OutputFormat.DEEPSTREAM), six([1, 2, 3, 4, 0.9, 2], [5, 6, 7, 8, 0.5, 0])),
    **{name: {"o": head()[None]} for name, head in HEADS.items()},
}


@pytest.mark.parametrize("count", [0, 2, 3])
def test_end_to_end_outputs_end_at_their_count(count: int) -> None:
    """Padding behind it may contain anything."""
    boxes, scores = np.vstack([BOXES, np.full((1, 4), np.nan)]), np.append(SCORES, np.nan)
    padded = four(count=np.array([count]), boxes=boxes, scores=scores, classes=np.append(CLASSES, -1))
    found = decode_outputs(spec_of(OutputFormat.END_TO_END), padded)
    for part, expected in zip(found[:3], (BOXES, SCORES, CLASSES), strict=True):
        np.testing.assert_array_equal(part, expected[:count])


def test_padding_of_six_columns_is_dropped_and_what_fp16_gives_is_rounded() -> None:
    """Rows with a score of zero or less are padding, wherever they are."""
    outputs = six([1, 2, 3, 4, 1.004, 1.999], [0, 0, 0, 0, 0, 0], [5, 6, 7, 8, 0.5, 7], [0, 0, 0, 0, -1, -1])

    found = decode_outputs(spec_of(OutputFormat.SIX_COLUMNS), outputs)

    np.testing.assert_array_equal(found.boxes, BOXES[:2])
    np.testing.assert_array_equal(found.scores, [1, SCORES[1]])
    assert found.class_ids.tolist() == [2, 7]


@pytest.mark.parametrize(
    ("output_format", "box"),
    [
        (OutputFormat.YOLO_HEAD, [8, 16, 12, 24]),
        (OutputFormat.YOLOV5_HEAD, [8, 16, 12, 24]),
        (OutputFormat.YOLOX_HEAD, [8, 8, 16, 16]),
        (OutputFormat.RTDETR, [24, 8, 40, 24]),
    ],
)
def test_head_is_decoded(output_format: OutputFormat, box: list[int]) -> None:
    spec = spec_of(output_format, has_normalized_boxes=output_format is OutputFormat.RTDETR)
    ((name, tensor),) = ANSWERS[output_format].items()
    alone = msgspec.structs.replace(spec, has_batch_dimension=False)
    turned = {name: tensor.swapaxes(1, 2) if output_format is OutputFormat.YOLO_HEAD else tensor}
    for found in (decode_outputs(spec, turned), decode_outputs(spec, {name: tensor}), decode_outputs(alone, {name: tensor[0]})):
        np.testing.assert_array_equal(found.boxes, [box])
        np.testing.assert_array_equal(found.scores, SCORES[:1])
        assert found.class_ids.tolist() == [1]
    empty = decode_outputs(spec, {name: np.zeros_like(tensor)})
    assert (empty.boxes.shape, empty.scores.shape, empty.class_ids.shape) == ((0, 4), (0,), (0,))


@pytest.mark.parametrize("output_format", OutputFormat)
def test_tensors_that_are_missing_or_of_another_batch_are_rejected(output_format: OutputFormat) -> None:
    """Nobody could tell whose answer it is."""
    spec, answer = spec_of(output_format), ANSWERS[output_format]
    for outputs in ({name: tensor.repeat(2, axis=0) for name, tensor in answer.items()}, dict.fromkeys(answer, np.zeros(()))):
        with pytest.raises(InvalidModelOutput, match=r"m returned \w+ of shape .* for one image"):
            decode_outputs(spec, outputs)
    if output_format is OutputFormat.SIX_COLUMNS:
        with pytest.raises(InvalidModelOutput, match="m returned o as float16, expected float32"):
            decode_outputs(BASE, {"o": np.zeros((1, 300, 6), np.float16)})
    with pytest.raises(InvalidModelOutput, match=f"m did not return {spec.output_names[0]}$"):
        decode_outputs(spec, {"other": np.zeros((1, 300, 6))})


def in_both(place: int, part: str, value: float) -> list[tuple[OutputFormat, Outputs]]:
    """Put a value into a row of six columns, and into a part of four tensors."""
    row: list[float] = [1, 2, 3, 4, 0.9, 0]
    row[place] = value
    changed = {"boxes": BOXES, "scores": SCORES, "classes": CLASSES}[part].astype(np.float64)
    changed.flat[1] = value
    return [(OutputFormat.SIX_COLUMNS, six(row)), (OutputFormat.END_TO_END, four(**{part: changed}))]


def broken(head: NDArray[np.float32], value: float, at: tuple[int, int] = (-1, -1)) -> Outputs:
    head[at] = value
    return {"o": head[None]}


SHAPES = {
    OutputFormat.SIX_COLUMNS: (3, 7),
    OutputFormat.YOLO_HEAD: (4, 42),
    OutputFormat.YOLOV5_HEAD: (3 * ANCHORS, 5),
    OutputFormat.RTDETR: (300,),
    OutputFormat.YOLOX_HEAD: (ANCHORS + 1, 7),
}
NOT_FINITE, NO_SCORE, NO_CLASS = "objects with values that are not finite", "scores outside 0 to 1", "an invalid class id"
PARTS: list[Outputs] = [{"count": np.array([2, 2])}, {"boxes": BOXES[:, :3]}, {"scores": SCORES[:2]}, {"classes": CLASSES[:2]}]
INVALID = [
    *((name, {"o": np.zeros((1, *shape), np.float32)}, "shape") for name, shape in SHAPES.items()),
    *((OutputFormat.END_TO_END, four(**part), "shape") for part in PARTS),
    *((OutputFormat.END_TO_END, four(count=np.array([n])), f"a count of {n} for 3 rows") for n in (-1, 4)),
    *((*case, NOT_FINITE) for case in in_both(1, "boxes", np.nan)),
    (OutputFormat.END_TO_END, four(boxes=np.full((3, 4), 1e300)), NOT_FINITE),  # no 32-bit float can hold it
    (OutputFormat.YOLOX_HEAD, broken(yolox(), 1000, (9, 2)), NOT_FINITE),  # a size that overflows
    *((*case, NO_SCORE) for value in (np.nan, 1.03) for case in in_both(4, "scores", value)),
    (OutputFormat.END_TO_END, four(scores=np.array([0.9, -0.1, 0.1])), NO_SCORE),  # no padding, because there is a count
    *((name, {"o": head(1.03)[None]}, NO_SCORE) for name, head in HEADS.items()),
    *((*case, NO_CLASS) for value in (-1, 0.9, np.nan) for case in in_both(5, "classes", value)),
    # A 64-bit id must not wrap round to another class.
    *((OutputFormat.END_TO_END, four(classes=np.array([0, id_, 1])), NO_CLASS) for id_ in (2**31, 2**32 + 5)),
    # Before decoding, which could drop it unnoticed.
    *((name, broken(head(), np.nan), "a head that is not finite") for name, head in HEADS.items()),
]


@pytest.mark.parametrize(("output_format", "outputs", "problem"), INVALID)
def test_invalid_outputs_are_rejected(output_format: OutputFormat, outputs: Outputs, problem: str) -> None:
    for read in (decode_outputs, raw_rows) if problem == "shape" else (decode_outputs,):
        with pytest.raises(InvalidModelOutput, match=f"m returned .*{problem}"):
            read(spec_of(output_format), outputs)


def test_image_that_the_model_could_not_decode_is_rejected() -> None:
    spec, outputs = spec_of(OutputFormat.END_TO_END, tells_decoded=True), four()

    assert decode_outputs(spec, outputs | {"decoded": np.array([[1]], np.int32)})
    with pytest.raises(InvalidImage, match="truncated or corrupt"):
        decode_outputs(spec, outputs | {"decoded": np.array([[0]], np.int32)})
    with pytest.raises(InvalidModelOutput, match="did not return decoded"):
        decode_outputs(spec, outputs)


def kept_scores(head: NDArray[np.float32], iou: float = 0.5) -> NDArray[np.float32]:
    found = from_yolo(head)
    return found.scores[suppress(found, found.class_ids, iou)]


def test_scores_at_the_floor_are_dropped() -> None:
    below, above = np.float32(MIN_SCORE), np.nextafter(np.float32(MIN_SCORE), np.float32(1))
    head = np.array([[50, 50, 10, 10, below], [150, 50, 10, 10, above]], np.float32).T

    assert from_yolo(head)[0].tolist() == [[145, 45, 155, 55]]
    assert from_yolo(head, 0)[0].tolist() == [[145, 45, 155, 55], [45, 45, 55, 55]]


def test_best_boxes_are_kept_if_there_are_too_many() -> None:
    """Candidates are limited before suppression, so that one behind a crowd is not seen."""
    scores = np.random.default_rng(0).permutation(np.linspace(0.1, 0.9, MAX_CANDIDATES + 200, dtype=np.float32))
    row = np.column_stack([[[20 * i, 50, 10, 10] for i in range(len(scores))], scores]).astype(np.float32)
    np.testing.assert_array_equal(kept_scores(row.T), np.sort(scores)[::-1][:MAX_DETECTIONS])

    crowd = np.array([[50, 50, 10, 10, 0.9]] * MAX_CANDIDATES + [[500, 500, 10, 10, 0.8]], np.float32)
    assert kept_scores(crowd.T).tolist() == pytest.approx([0.9])
    assert kept_scores(crowd[1:].T).tolist() == pytest.approx([0.9, 0.8])


def test_anchors_cover_the_input_row_by_row() -> None:
    """Anchors run over x, then y, then the strides 8, 16 and 32."""
    corners, strides = anchor_grid((64, 32))

    assert [corners[index].tolist() for index in (0, 1, 8, 31, 32, 36, 41)] == [
        *([0, 0], [1, 0], [0, 1], [7, 3], [0, 0], [0, 1], [1, 0])
    ]
    assert strides.ravel().tolist() == [8] * 32 + [16] * 8 + [32] * 2
    for size in ((64, 32), (700, 33), (1, 5)):
        assert count_anchors(size) == len(anchor_grid(size)[0])


LABELS = ("person", "car", "traffic light")


def candidates(*scores: float, class_ids: list[int] | None = None) -> Candidates:
    boxes = np.arange(len(scores), dtype=np.float32)[:, None] + np.array([[0, 0, 2, 2]], np.float32)
    return Candidates(boxes, np.array(scores, np.float32), np.array(class_ids or [0] * len(scores), np.int32))


def chosen(
    found: Candidates, *, confidence: float = 0.1, class_ids: frozenset[int] | None = None, max_detections: int = 10
) -> list[int]:
    kept = select(found, confidence=confidence, class_ids=class_ids)
    return [int(x) for x in kept.boxes[choose_best(kept.boxes, max_detections), 0]]


@pytest.mark.parametrize("confidence", [0.0, 0.3, 1.0])
def test_confidence_is_the_least_score_and_equal_scores_keep_their_order(confidence: float) -> None:
    at = np.float32(confidence)

    assert chosen(candidates(float(at), float(np.nextafter(at, np.float32(-1)))), confidence=confidence) == [0]
    assert chosen(candidates(*[0.5, 0.9] * 100), max_detections=300) == [*range(1, 200, 2), *range(0, 200, 2)]


@pytest.mark.parametrize("box", [(5, 0, 5, 9), (0, 9, 9, 5)])
def test_box_without_an_area_is_dropped(box: tuple[int, int, int, int]) -> None:
    """It lies in the padding, or the model put its corners the wrong way round; it takes no place of another box."""
    found = candidates(0.5, 0.9, 0.7)
    found.boxes[0] = 0, 0, np.nextafter(np.float32(0), np.float32(1)), 2
    found.boxes[1] = box

    assert chosen(found, max_detections=1) == [2]
    assert chosen(found, max_detections=3) == [2, 0]


def test_classes_are_names_or_ids() -> None:
    for names, labels, ids in (
        (None, LABELS, None),
        (["0", "person", "02"], LABELS, {0, 2}),
        ([], LABELS, set()),
        (["5"], ("7", "5"), {1}),
        (["car"], ("car", "bus", "car"), {0, 2}),
        (["0", "79", "100000"], (), {0, 79, 100000}),
    ):
        assert to_class_ids(names, labels) == ids


@pytest.mark.parametrize("name", ["Person", "", "-1", "²", "9" * 5000, "3"])
def test_any_other_class_is_rejected(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        to_class_ids(["0", name], LABELS)

    similar = "; did you mean person?" if name == "Person" else ""
    assert caught.value.detail == f"classes: {name[:64]!r} is not a class of this model{similar}"
    assert to_class_ids(["0", name], LABELS, drops_unknown=True) == frozenset({0})
    assert chosen(candidates(0.9, class_ids=[1]), class_ids=frozenset({1, 10**30})) == [0]  # no integer of the array


@st.composite
def crowds(draw: st.DrawFn) -> Candidates:
    """Draw up to a dozen candidates on a few pixels, so that many overlap; scores differ, so that their order is certain."""
    count = draw(st.integers(0, 12))
    corners = draw(arrays.arrays(np.float32, (count, 4), elements=st.integers(0, 6).map(float)))
    boxes = np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], axis=1)
    scores = np.array(draw(st.permutations(range(count))), np.float32) / np.float32(12)
    return Candidates(boxes, scores, draw(arrays.arrays(np.int32, count, elements=st.integers(0, 2))))


suppressions = st.builds(Suppression, st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.7, 1.0]), st.booleans(), st.just(suppress))


def overlap(a: list[float], b: list[float]) -> float:
    """Divide the intersection of two boxes by their union; nothing has none in common with nothing."""
    common = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union else 0.0


def plainly(
    found: Candidates, confidence: float, class_ids: frozenset[int] | None, suppression: Suppression
) -> list[tuple[float, int, list[float]]]:
    """Go through the wanted ones, best first; keep each that overlaps none kept before."""
    kept: list[tuple[float, int, list[float]]] = []
    for score, class_, box in sorted(
        zip(found.scores.tolist(), found.class_ids.tolist(), found.boxes.tolist(), strict=True), reverse=True
    ):
        rivals = [other for _, other_class, other in kept if suppression.is_agnostic or other_class == class_]
        is_wanted = score >= confidence and (class_ids is None or class_ in class_ids)
        if is_wanted and all(overlap(box, other) <= suppression.iou for other in rivals):
            kept.append((score, class_, box))
    return kept


@given(crowds(), st.sampled_from([0.0, 0.25, 0.5]), st.none() | st.frozensets(st.integers(0, 2)), suppressions)
def test_suppression_is_that_of_a_plain_loop(
    found: Candidates, confidence: float, class_ids: frozenset[int] | None, suppression: Suppression
) -> None:
    kept = select(found, confidence=confidence, class_ids=class_ids, suppression=suppression)

    expected = plainly(found, confidence, class_ids, suppression)
    assert [(s, c, b) for b, s, c in zip(*(part.tolist() for part in kept[:3]), strict=True)] == expected


@pytest.mark.parametrize(
    ("output_format", "iou", "max_iou", "is_agnostic", "expected"),
    [
        *((output_format, None, 1.0, False, 0.45 if output_format in RAW_HEADS else None) for output_format in OutputFormat),
        (OutputFormat.SIX_COLUMNS, 0.3, 0.5, False, 0.3),
        (OutputFormat.RTDETR, None, 0.5, True, 0.45),
        (OutputFormat.END_TO_END, 0.5, 0.5, False, None),  # the model leaves no more
        (OutputFormat.END_TO_END, 0.5, 0.5, True, 0.5),
        (OutputFormat.YOLO_HEAD, 1.0, 1.0, False, 1.0),
    ],
)
def test_duplicates_are_suppressed_where_the_model_does_not(
    output_format: OutputFormat, iou: float | None, max_iou: float, expected: float | None, *, is_agnostic: bool
) -> None:
    """More than the model leaves cannot be asked for: the suppressed boxes are gone."""
    head = DetectionHead(output_format=output_format, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)

    suppression = None if expected is None else Suppression(expected, is_agnostic, suppress)
    assert to_suppression(iou, head, is_agnostic=is_agnostic) == suppression
    if max_iou < 1:
        with pytest.raises(InvalidParameter, match=rf"^iou: the model itself drops boxes that overlap by more than {max_iou}"):
            to_suppression(max_iou + 0.01, head, is_agnostic=is_agnostic)
