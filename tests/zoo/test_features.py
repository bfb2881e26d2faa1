"""Networks for segmentation, poses and rotated boxes: recognised, composed, and decoded as in a textbook."""

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.detection.nms import MIN_SCORE
from app.zoo.compose import compose_model
from app.zoo.inference import open_session, run
from app.zoo.recipe import ObbRecipe, PoseRecipe, SegmentationRecipe
from app.zoo.recognize import Options, Unrecognized, recognize
from tests.zoo.exported import FEATURES, WIDE, exported, feature_tensors
from tests.zoo.textbook import overlap

IOU = 0.5
NAMES = {0: "a", 1: "b", 2: "c"}
OUTPUTS = {"segmentation": "det_masks", "pose": "det_keypoints", "obb": "det_angles"}
RECIPES: dict[str, Any] = {
    "segmentation": SegmentationRecipe(size=WIDE, head="yolo", prototypes=(5, 32, 64)),
    "pose": PoseRecipe(size=WIDE, head="yolo", keypoints=(2, 3), keypoint_names=("nose", "tail")),
    "obb": ObbRecipe(size=WIDE, head="yolo"),
}

Floats = NDArray[Any]


def probabilistic_overlap(one: Floats, other: Floats) -> float:
    """Return 1 - the Hellinger distance of two rotated boxes (5,) cx cy w h angle, which stand for normal distributions."""
    covariances = []
    for _, _, width, height, angle in (one, other):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        covariances.append(turn @ np.diag([width**2, height**2]) / 12 @ turn.T)
    middle, apart = sum(covariances) / 2, one[:2] - other[:2]
    distance = apart @ np.linalg.inv(middle) @ apart / 8
    distance += np.log(np.linalg.det(middle) / np.sqrt(np.prod([np.linalg.det(covariance) for covariance in covariances]))) / 2
    return float(1 - np.sqrt(1 - np.exp(-distance)))


def textbook(task: str, head: str, table: NDArray[Any]) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Return boxes (n, 4) x1 y1 x2 y2, classes and columns (box, features) of the objects in a head, by descending score."""
    rows: Floats = table.astype(np.float64) if head == "end_to_end" else table.T.astype(np.float64)
    if head == "end_to_end":
        boxes, scores, classes, features = rows[:, :4], rows[:, 4], rows[:, 5].astype(int), rows[:, 6:]
    else:
        boxes, scores, classes, features = rows[:, :4], rows[:, 4:7].max(axis=1), rows[:, 4:7].argmax(axis=1), rows[:, 7:]
    order = np.argsort(-scores, kind="stable")  # as TopK: scores of FP16 may be equal
    order = order[scores[order] > MIN_SCORE]
    turned = np.hstack([boxes, features])
    if head == "yolo" or task == "obb":
        boxes = np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])
    kept: list[int] = []
    for position, row in enumerate(order):
        better = [other for other in (order[:position] if task == "obb" else kept) if classes[other] == classes[row]]
        if head == "end_to_end":
            overlaps = []
        elif task == "obb":
            overlaps = [probabilistic_overlap(turned[row], turned[other]) for other in better]
        else:
            overlaps = list(overlap(boxes[row], boxes[better]))
        if max(overlaps, default=0) <= IOU:
            kept.append(row)
    return boxes[kept], classes[kept], features[kept]


@pytest.mark.parametrize("properties", [{"half": True}, {"symbolic": True, "batch": 1}])
@pytest.mark.parametrize("head", ["yolo", "end_to_end"])
@pytest.mark.parametrize("task", list(FEATURES))
def test_features_are_those_of_their_object(task: str, head: str, properties: dict[str, Any]) -> None:
    tensors = feature_tensors(task, head)
    if properties.get("half"):
        tensors = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    network = exported(tensors, WIDE, names=NAMES, **FEATURES[task], **properties)
    recipe, labels, shapes, *_ = recognize(network, Options(iou=IOU))
    found = run(open_session(compose_model(network, recipe, shapes=shapes)), {"image": np.zeros((2, *WIDE[::-1], 3), np.uint8)})
    boxes, classes, features = textbook(task, head, tensors["output0"])

    assert (recipe.head, labels) == (head, tuple(NAMES.values()))
    assert head == "end_to_end" or recipe == msgspec.structs.replace(RECIPES[task], iou=IOU)
    assert len(boxes) > 20
    for image in range(2):
        count, rows = len(boxes), found[OUTPUTS[task]][image]
        assert found["num_dets"][image] == count
        assert found["det_classes"][image, :count].tolist() == classes.tolist()
        np.testing.assert_allclose(found["det_boxes"][image, :count], boxes, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(rows.reshape(300, -1)[:count], features, rtol=1e-5)
        assert rows.shape[1:] == {"segmentation": (5,), "pose": (2, 3), "obb": ()}[task]
        assert not rows[count:].any()
        if task == "segmentation":
            assert found["prototypes"].dtype == np.float16
            np.testing.assert_allclose(found["prototypes"][image], tensors["output1"], atol=2e-3)


def angles_found(turned: list[tuple[float, ...]], iou: float = IOU) -> list[float]:
    """Compose a model from a network that finds rotated boxes (cx, cy, w, h, angle, class), and return the angles it keeps."""
    table = np.zeros((8, 672))
    for anchor, (x, y, width, height, angle, label) in enumerate(turned):
        table[:4, anchor], table[4 + int(label), anchor], table[7, anchor] = (x, y, width, height), 0.9 - 0.1 * anchor, angle
    model = compose_model(exported({"output0": table}, WIDE), ObbRecipe(size=WIDE, head="yolo", iou=iou))
    found = run(open_session(model), {"image": np.zeros((1, *WIDE[::-1], 3), np.uint8)})
    return [round(float(angle), 3) for angle in found["det_angles"][0, : found["num_dets"].item()]]


@pytest.mark.parametrize(
    ("turned", "kept"),
    [
        pytest.param([(99, 64, 60, 20, 0, 1), (99, 64, 60, 20, 0.3, 2)], [0, 0.3], id="another class"),
        pytest.param([(99, 64, 60, 20, 0, 1), (99, 64, 20, 60, 1.571, 1)], [0], id="the same box, written across"),
        pytest.param(
            [(99, 64, 60, 20, 0, 1), (99, 64, 60, 20, 0.45, 1), (99, 64, 60, 20, 0.9, 1)], [0], id="a box that falls counts"
        ),
        pytest.param([(99, 64, 60, 20, 0, 1), (99, 64, 60, 20, 0.9, 1)], [0, 0.9], id="without it, the last one stays"),
    ],
)
def test_rotated_box_near_any_better_one_is_dropped(turned: list[tuple[float, ...]], kept: list[float]) -> None:
    assert angles_found(turned) == kept
    assert len(angles_found(turned, iou=1)) == len(turned)


def test_all_rotated_boxes_above_the_floor_are_compared() -> None:
    """The 301st takes the row of one that falls."""
    table = np.zeros((8, 672))
    table[:4, :301] = [[0], [64], [8], [4]]
    table[0, :301] = [*(100 * i for i in range(299)), 29800, 50000]
    table[4, :301] = np.linspace(0.9, 0.1, 301)
    model = compose_model(exported({"output0": table}, WIDE), ObbRecipe(size=WIDE, head="yolo", iou=IOU))
    found = run(open_session(model), {"image": np.zeros((1, *WIDE[::-1], 3), np.uint8)})

    assert found["num_dets"].item() == 300
    assert found["det_boxes"][0, -2:, 0].tolist() == [29796, 49996]


def test_names_of_keypoints_are_those_of_all_classes() -> None:
    for names, found in (({0: ["x", "y"], 1: ["x", "z"]}, ()), ({0: ["x", "\x1b"]}, ()), ({0: ["x", "y"]}, ("x", "y"))):
        properties = {**FEATURES["pose"], "kpt_names": names}
        recipe = recognize(exported(feature_tensors("pose", "yolo"), WIDE, names=NAMES, **properties), Options()).recipe
        assert isinstance(recipe, PoseRecipe)
        assert recipe.keypoint_names == found


@pytest.mark.parametrize(
    ("task", "metadata", "options", "message"),
    [
        ("pose", {"kpt_shape": [3, 3]}, {}, "do not fit a known head for pose"),
        ("pose", {"kpt_shape": [1, 6]}, {}, "does not say `kpt_shape`"),
        ("obb", {"task": "depth"}, {}, "is a model for the task 'depth'; these can be served: detection, classification, "),
        ("obb", {}, {"box_units": "normalized"}, "cannot be served so: box_units is for detectors"),
    ],
)
def test_user_is_told_what_is_wrong(task: str, metadata: dict[str, Any], options: dict[str, Any], message: str) -> None:
    network = exported(feature_tensors(task, "yolo"), WIDE, **{"names": NAMES, **FEATURES[task], **metadata})

    with pytest.raises(Unrecognized, match=message):
        recognize(network, Options(**options))
