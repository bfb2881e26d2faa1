"""Composed models are valid, and find what the published network finds with a textbook post-processing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE
from app.zoo import registry
from app.zoo.compose import compose_model
from app.zoo.inference import open_session, run
from app.zoo.recipe import (
    RAW_HEADS,
    ClassificationRecipe,
    DetectionHeadName,
    DetectionRecipe,
    ObbRecipe,
    PoseRecipe,
    SegmentationRecipe,
)
from app.zoo.recognize import Options, recognize
from tests.support import IMAGES, SHARED
from tests.zoo.exported import FEATURES, IN_PIXELS, WIDE, exported, feature_tensors, head_tensors, parse

MAX_PAIRS = 30_000
AS_CENTRES = ("rtdetr", "rtdetr_topk", "rfdetr", "detr", "detr_sigmoid")

Floats = NDArray[np.float32]


class Detections(NamedTuple):
    boxes: Floats
    """(n, 4) x1 y1 x2 y2 in pixels of the input."""
    scores: Floats
    classes: NDArray[np.int32]


def overlap(one: Floats, others: Floats) -> Floats:
    """Return the intersection over union of a box (4,) with boxes (n, 4)."""
    shared = np.clip(np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2]), 0, None).prod(axis=1)
    union = (one[2:] - one[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - shared
    result: Floats = shared / union
    return result


def textbook(head: Floats, recipe: DetectionRecipe) -> Detections:
    """Decode the head of one image, then suppress class by class, as in every tutorial."""
    if recipe.head == "yolo":
        centres, sizes, scores = head[:2].T, head[2:4].T, head[4:].T
    elif recipe.head == "yolov5":
        centres, sizes, scores = head[:, :2], head[:, 2:4], head[:, 4:5] * head[:, 5:]
    elif recipe.head == "deepstream":
        centres, sizes = ((head[:, :2] + head[:, 2:4]) / 2).astype(np.float32), head[:, 2:4] - head[:, :2]
        scores = (np.eye(3)[head[:, 5].astype(int)] * head[:, 4:5]).astype(np.float32)
    else:
        width, height = recipe.size
        cells = [(x, y, s) for s in (8, 16, 32) for y in range(height // s) for x in range(width // s)]
        grid, stride = np.split(np.array(cells, np.float32), [2], axis=1)
        centres, sizes = (head[:, :2] + grid) * stride, np.exp(head[:, 2:4]) * stride
        scores = head[:, 4:5] * head[:, 5:]
    corners = np.hstack([centres - sizes / 2, centres + sizes / 2]).astype(np.float32)
    if recipe.box_units == "normalized":
        corners *= np.array(recipe.size * 2, np.float32)
    is_best = scores == scores.max(axis=1, keepdims=True)
    anchors, label = np.nonzero((scores > recipe.floor) & (is_best | recipe.multi_label))
    corners, best = corners[anchors], scores[anchors, label]
    ranks, kept = np.argsort(-best)[:MAX_PAIRS], []
    for class_id in np.unique(label):
        remaining = [i for i in ranks if label[i] == class_id]
        while remaining:
            first = remaining.pop(0)
            kept.append(first)
            remaining = [
                i for i, iou in zip(remaining, overlap(corners[first], corners[remaining]), strict=True) if iou <= recipe.iou
            ]
    kept = sorted(kept, key=lambda i: -best[i])[:MAX_DETECTIONS]
    return Detections(corners[kept], best[kept], label[kept].astype(np.int32))


def assert_same(found: Detections, expected: Detections) -> None:
    """Compare detections, ignoring the order of equal scores."""
    assert sorted(found.classes) == sorted(expected.classes)
    for box, score, label in zip(*found, strict=True):
        same_class = np.flatnonzero(expected.classes == label)
        overlaps = overlap(box, expected.boxes[same_class])
        nearest = same_class[overlaps.argmax()]
        assert overlaps.max() >= 0.99
        assert abs(score - expected.scores[nearest]) <= 0.01


def found_once(tensors: Mapping[str, Floats], recipe: DetectionRecipe) -> Detections:
    """Decode the tensors of one image in which each object is found once."""
    match recipe.head, list(tensors.values()):
        case "end_to_end" | "rtdetr_topk", [head]:
            boxes, scores, classes = head[:, :4], head[:, 4], head[:, 5]
        case "rtdetr", [head]:
            boxes, scores, classes = head[:, :4], head[:, 4:].max(axis=1), head[:, 4:].argmax(axis=1)
        case ("rfdetr", [boxes, logits]) | ("detr_sigmoid", [logits, boxes]):
            probabilities = (1 / (1 + np.exp(-logits[:, :3]))).astype(np.float32)
            query, classes = np.divmod(np.arange(probabilities.size), probabilities.shape[1])
            boxes, scores = boxes[query], probabilities.ravel()
        case "detr", [logits, boxes]:
            shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            scores, classes = shares[:, :-1].max(axis=1), shares[:, :-1].argmax(axis=1)
        case "four_tensors", [count, *rows]:
            boxes, scores, classes = (tensor[: int(count[0])] for tensor in rows)
        case _:
            classes, boxes, scores = tensors.values()
    if recipe.head in AS_CENTRES:
        boxes = np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])
    if recipe.head not in IN_PIXELS or recipe.box_units == "normalized":
        boxes = boxes * np.array(recipe.size * 2, np.float32)
    kept = np.argsort(-scores, kind="stable")[:MAX_DETECTIONS]
    kept = kept[scores[kept] > MIN_SCORE]
    return Detections(boxes[kept].astype(np.float32), scores[kept], classes[kept].astype(np.int32))


def objects_of(tensors: Mapping[str, NDArray[Any]], recipe: DetectionRecipe) -> Detections:
    exact = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return textbook(next(iter(exact.values())), recipe) if recipe.head in RAW_HEADS else found_once(exact, recipe)


PHOTOS = sorted(IMAGES.glob("*.jpg"))
MORE_PHOTOS = [pytest.param(path, marks=pytest.mark.system) for path in sorted((SHARED / "images").glob("*.jpg"))]
SQUARE = 256
ANCHORS = 1344
"""32 x 32 + 16 x 16 + 8 x 8 cells."""
YOLO = DetectionRecipe(size=(SQUARE, SQUARE), channels="RGB", scale=255.0, head="yolo", iou=0.5)
AP = {"floor": 0.001, "multi_label": True}
COLUMNS = ("num_dets", "det_boxes", "det_scores", "det_classes")


class Subject(NamedTuple):
    recipe: DetectionRecipe
    published: onnxruntime.InferenceSession
    session: onnxruntime.InferenceSession


def valid_rows(found: Mapping[str, NDArray[Any]]) -> list[Detections]:
    """Return what a composed model has found in each image."""
    rows = zip(*(found[name] for name in COLUMNS), strict=True)
    return [Detections(boxes[:count], scores[:count], classes[:count]) for (count,), boxes, scores, classes in rows]


def on_canvas(path: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    canvas = Image.new("RGB", size, (114, 114, 114))
    with Image.open(path) as image:
        image.thumbnail(size)
        canvas.paste(image)
    return np.asarray(canvas)


def yolo_head(*objects: tuple[float, float, float, float, int, float], classes: int = 3) -> Floats:
    """Write (centre x, centre y, width, height, class, score) into the first anchors of an empty head."""
    head = np.zeros((4 + classes, ANCHORS), np.float32)
    for anchor, (x, y, width, height, label, score) in enumerate(objects):
        head[:4, anchor] = x, y, width, height
        head[4 + label, anchor] = score
    return head


def run_on_blank(model: onnx.ModelProto, images: int = 1, size: tuple[int, int] = WIDE) -> dict[str, NDArray[Any]]:
    return run(open_session(model), {"image": np.zeros((images, *size[::-1], 3), np.uint8)})


def answer(head: Floats, **options: Any) -> Detections:  # noqa: ANN401
    """Compose a model from a network that returns this head, and run it."""
    model = compose_model(exported({"output0": head}), msgspec.structs.replace(YOLO, **options))
    return valid_rows(run_on_blank(model, size=YOLO.size))[0]


@pytest.fixture(scope="module", params=["yolo11n", "yolox_nano", "yolo11n for AP", "yolox_nano for AP"])
def subject(request: pytest.FixtureRequest, networks: dict[str, Path]) -> Subject:
    name, _, is_for_ap = request.param.partition(" ")
    if name not in networks:
        pytest.skip(f"the published network of {name} is not available here")
    network = onnx.load(networks[name])
    recipe = registry.load()[name].vary(AP if is_for_ap else {}).recipe
    assert isinstance(recipe, DetectionRecipe)
    return Subject(recipe, open_session(network), open_session(compose_model(network, recipe)))


@pytest.mark.parametrize("path", [*PHOTOS, *MORE_PHOTOS], ids=lambda path: path.stem)
def test_composed_model_finds_what_the_published_network_finds(subject: Subject, path: Path) -> None:
    """Also in a batch, with another image."""
    canvas = on_canvas(path, subject.recipe.size)
    planes = canvas.transpose(2, 0, 1)[None].astype(np.float32)
    if subject.recipe.channels == "BGR":
        planes = np.ascontiguousarray(planes[:, ::-1])
    name = subject.published.get_inputs()[0].name
    (head,) = run(subject.published, {name: planes / np.float32(subject.recipe.scale)}).values()
    expected = textbook(head[0], subject.recipe)

    assert len(expected.scores) > 0
    for batch in (canvas[None], np.stack([canvas[::-1], canvas])):
        assert_same(valid_rows(run(subject.session, {"image": batch}))[-1], expected)


def engine_key(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return what ONNX Runtime finds a TensorRT engine by: the names of inputs and of the results of nodes."""
    return *(value.name for value in model.graph.input), *(result for node in model.graph.node for result in node.output)


def test_engine_cache_tells_all_composed_models_apart() -> None:
    heads = [yolo_head((50, 50, 20, 20, 0, score)) for score in (0.4, 0.5)]
    recipes = [YOLO, *(msgspec.structs.replace(YOLO, **option) for option in ({"iou": 0.6}, {"scale": 1.0}, {"channels": "BGR"}))]
    models = [compose_model(exported({"output0": head}, batch=1), recipe) for head in heads for recipe in recipes]
    models.append(compose_model(exported({"output0": heads[0]}, batch=1), YOLO, batch=1))
    wide = (2 * SQUARE, SQUARE // 2)
    models.append(compose_model(exported({"output0": heads[0]}, wide, batch=1), msgspec.structs.replace(YOLO, size=wide)))
    keys = [engine_key(model) for model in models]

    assert len({*keys}) == len({model.graph.name for model in models}) == len(models)
    assert engine_key(compose_model(exported({"output0": heads[0]}, batch=1), YOLO)) == keys[0]


def test_best_objects_are_kept_if_there_are_more_than_rows() -> None:
    objects = [(6 + 12 * (i % 20), 6 + 12 * (i // 20), 10.0, 10.0, i % 3, 0.1 + 0.002 * i) for i in range(400)]
    found = answer(yolo_head(*objects))

    assert found.scores == pytest.approx(np.array(sorted((row[5] for row in objects), reverse=True)[:MAX_DETECTIONS]))
    assert len(np.unique(found.boxes, axis=0)) == MAX_DETECTIONS


def test_candidates_are_limited_before_suppression() -> None:
    last, too_low = (150.0, 50.0, 20.0, 20.0, 0, 0.5), (150.0, 150.0, 20.0, 20.0, 0, 0.4)
    crowd = [(50.0, 50.0, 20.0, 20.0, 0, 0.9)] * (MAX_CANDIDATES - 1)
    assert answer(yolo_head(*crowd, last, too_low)).scores == pytest.approx(np.array([0.9, 0.5]))

    head = yolo_head(last, too_low, classes=23)
    head[:4, 2:] = np.array([[50], [50], [20], [20]])
    head[4:, 2:].flat[: MAX_PAIRS - 1] = 0.9
    assert answer(head, multi_label=True).scores == pytest.approx(np.array([0.9] * 23 + [0.5]))


@pytest.mark.parametrize(
    ("properties", "kept_batch"),
    [({"half": True}, None), ({"symbolic": True, "batch": 1}, None), ({"batch": 1}, 1)],
    ids=["FP16", "symbolic shapes and a batch of one", "batch of one, kept"],
)
@pytest.mark.parametrize(
    ("head", "unit"),
    [
        *((head, "pixels") for head in IN_PIXELS),
        *((head, "normalized") for head in (*IN_PIXELS, *AS_CENTRES, "yolox", "dfine")),
    ],
)
def test_every_head_is_decoded_as_in_a_textbook(
    head: DetectionHeadName, unit: Literal["pixels", "normalized"], properties: dict[str, Any], kept_batch: int | None
) -> None:
    recipe = DetectionRecipe(size=WIDE, head=head, iou=0.5, box_units=unit if head in IN_PIXELS else "pixels")
    tensors = head_tensors(head, WIDE if unit == "pixels" else (1, 1))
    if properties.get("half"):
        tensors = {name: tensor if tensor.dtype.kind == "i" else tensor.astype(np.float16) for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model = compose_model(exported(tensors, WIDE, **properties), recipe, classes=3, shapes=shapes, batch=kept_batch)
    outputs = run_on_blank(model, kept_batch or 2)

    objects = objects_of(tensors, recipe)
    assert len(objects.scores) > 20
    count, *columns = (outputs[name] for name in COLUMNS)
    assert [tensor.shape[1] for tensor in (count, *columns)] == [1, 300, 300, 300]  # as configs say
    assert not any(tensor[:, count[0, 0] :].any() for tensor in columns)
    for found in valid_rows(outputs):
        assert_same(found, objects)
        assert found.scores.tolist() == sorted(found.scores, reverse=True)


@pytest.mark.parametrize(("classes", "found"), [(None, [1, 0]), (2, [1, 0]), (3, [2, 1, 0])])
def test_query_may_be_of_several_classes(classes: int | None, found: list[int]) -> None:
    """The last column of `rfdetr` is a class if all of them are."""
    tensors = {"dets": np.array([[0.5, 0.5, 0.2, 0.2]]), "labels": np.array([[-1.0, 1.0, 2.0]])}
    model = compose_model(exported(tensors), DetectionRecipe(size=(SQUARE, SQUARE), head="rfdetr"), classes=classes)

    assert valid_rows(run_on_blank(model, size=(SQUARE, SQUARE)))[0].classes.tolist() == found


MEANS = "network (float[1, 3, 64, 64] images) => ({}) {{ output = ReduceMean <axes = [2, 3], keepdims = 0> (images) }}"
LOGITS = ClassificationRecipe(size=(64, 64), head="logits", scale=51.0)
AS_THEY_ARE = ClassificationRecipe(size=(64, 64), head="probabilities", channels="BGR", mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2))


@pytest.mark.parametrize(("recipe", "expected"), [(LOGITS, [0.01715, 0.04661, 0.93624]), (AS_THEY_ARE, [1.8, 0.2, -0.05])])
def test_classes_have_probabilities_and_channels_their_own_mean_and_deviation(
    recipe: ClassificationRecipe, expected: list[float]
) -> None:
    image = np.full((1, 64, 64, 3), (51, 102, 255), np.uint8)
    composed = compose_model(parse(MEANS.format("float[1, 3] output")), recipe)
    (probabilities,) = run(open_session(composed), {"image": image}).values()

    assert probabilities == pytest.approx(np.array([expected]), abs=1e-4)


Array = NDArray[Any]
IOU = 0.5
NAMES = {0: "a", 1: "b", 2: "c"}
OUTPUTS = {"segmentation": "det_masks", "pose": "det_keypoints", "obb": "det_angles"}
RECIPES: dict[str, Any] = {
    "segmentation": SegmentationRecipe(size=WIDE, head="yolo", prototypes=(5, 32, 64)),
    "pose": PoseRecipe(size=WIDE, head="yolo", keypoints=(2, 3), keypoint_names=("nose", "tail")),
    "obb": ObbRecipe(size=WIDE, head="yolo"),
}


def probabilistic_overlap(one: Array, other: Array) -> float:
    """Return 1 - the Hellinger distance of two rotated boxes (5,) cx cy w h angle, which stand for normal distributions."""
    covariances = []
    for _, _, width, height, angle in (one, other):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        covariances.append(turn @ np.diag([width**2, height**2]) / 12 @ turn.T)
    middle, apart = sum(covariances) / 2, one[:2] - other[:2]
    distance = apart @ np.linalg.inv(middle) @ apart / 8
    distance += np.log(np.linalg.det(middle) / np.sqrt(np.prod([np.linalg.det(covariance) for covariance in covariances]))) / 2
    return float(1 - np.sqrt(1 - np.exp(-distance)))


def decoded(task: str, head: str, table: NDArray[Any]) -> tuple[Array, NDArray[np.intp], Array]:
    """Return boxes (n, 4) x1 y1 x2 y2, classes and columns (box, features) of the objects in a head, by descending score."""
    rows: Array = table.astype(np.float64) if head == "end_to_end" else table.T.astype(np.float64)
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
    found = run_on_blank(compose_model(network, recipe, shapes=shapes), images=2)
    boxes, classes, features = decoded(task, head, tensors["output0"])

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
