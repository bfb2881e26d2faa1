"""Composed models are valid, and find what the published network finds with a textbook post-processing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser
from PIL import Image

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE
from app.zoo import registry
from app.zoo.compose import compose_model
from app.zoo.graph import IR_VERSION, OPSET
from app.zoo.recipe import ClassificationRecipe, DetectionHeadName, DetectionRecipe
from tests.support import IMAGES, SHARED
from tests.zoo.exported import WIDE, exported, head_tensors, parse
from tests.zoo.textbook import MAX_PAIRS, Detections, Floats, assert_same, objects_of, textbook

PHOTOS = sorted(IMAGES.glob("*.jpg"))
MORE_PHOTOS = [pytest.param(path, marks=pytest.mark.system) for path in sorted((SHARED / "images").glob("*.jpg"))]
SQUARE = 256
ANCHORS = 1344
"""32 x 32 + 16 x 16 + 8 x 8 cells."""
YOLO = DetectionRecipe(size=(SQUARE, SQUARE), channels="RGB", scale=255.0, head="yolo", iou=0.5)
AP = {"floor": 0.001, "multi_label": True}


class Subject(NamedTuple):
    recipe: DetectionRecipe
    published: onnxruntime.InferenceSession
    session: onnxruntime.InferenceSession


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def outputs(runner: onnxruntime.InferenceSession, batch: NDArray[np.uint8]) -> list[NDArray[np.generic]]:
    tensors: list[NDArray[np.generic]] = runner.run(["num_dets", "det_boxes", "det_scores", "det_classes"], {"image": batch})
    return tensors


def detect(runner: onnxruntime.InferenceSession, batch: NDArray[np.uint8]) -> list[Detections]:
    """Run a composed model, and return the valid rows of each image."""
    rows = zip(*outputs(runner, batch), strict=True)
    return [Detections(boxes[:count], scores[:count], classes[:count]) for (count,), boxes, scores, classes in rows]


def on_canvas(path: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Put an image into the top left of a grey canvas."""
    canvas = Image.new("RGB", size, (114, 114, 114))
    with Image.open(path) as image:
        image.thumbnail(size)
        canvas.paste(image)
    return np.asarray(canvas)


def network(head: Floats, takes: str = f"float[1, 3, {SQUARE}, {SQUARE}] images", opset: int = OPSET) -> onnx.ModelProto:
    """Make a network that returns a head."""
    text = f"network ({takes}) => (float{[1, *head.shape]} output0) {{ output0 = Tile (head, repeats) }}"
    model = parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {opset}]> {text}')
    repeats = np.array([1] * (1 + head.ndim))
    model.graph.initializer.extend(numpy_helper.from_array(*pair) for pair in ((head[None], "head"), (repeats, "repeats")))
    return model


def yolo_head(*objects: tuple[float, float, float, float, int, float], classes: int = 3) -> Floats:
    """Write (centre x, centre y, width, height, class, score) into the first anchors of an empty head."""
    head = np.zeros((4 + classes, ANCHORS), np.float32)
    for anchor, (x, y, width, height, label, score) in enumerate(objects):
        head[:4, anchor] = x, y, width, height
        head[4 + label, anchor] = score
    return head


def run(model: onnx.ModelProto, images: int = 1, size: tuple[int, int] = (SQUARE, SQUARE)) -> list[Detections]:
    """Run a composed model on blank images."""
    return detect(session(model), np.zeros((images, *size[::-1], 3), np.uint8))


def answer(head: Floats, **options: Any) -> Detections:  # noqa: ANN401
    """Compose a model from a network that returns this head, and run it."""
    return run(compose_model(exported({"output0": head}), msgspec.structs.replace(YOLO, **options)))[0]


@pytest.fixture(scope="module", params=["yolo11n", "yolox_nano", "yolo11n for AP", "yolox_nano for AP"])
def subject(request: pytest.FixtureRequest, networks: dict[str, Path]) -> Subject:
    """A published network, and the model composed from it."""
    name, _, is_for_ap = request.param.partition(" ")
    if name not in networks:
        pytest.skip(f"the published network of {name} is not available here")
    network = onnx.load(networks[name])
    recipe = registry.load()[name].vary(AP if is_for_ap else {}).recipe
    assert isinstance(recipe, DetectionRecipe)
    published = session(network)
    return Subject(recipe, published, session(compose_model(network, recipe)))


@pytest.mark.parametrize("path", [*PHOTOS, *MORE_PHOTOS], ids=lambda path: path.stem)
def test_composed_model_finds_what_the_published_network_finds(subject: Subject, path: Path) -> None:
    """Also in a batch, with another image."""
    canvas = on_canvas(path, subject.recipe.size)
    planes = canvas.transpose(2, 0, 1)[None].astype(np.float32)
    if subject.recipe.channels == "BGR":
        planes = np.ascontiguousarray(planes[:, ::-1])
    name = subject.published.get_inputs()[0].name
    (head,) = subject.published.run(None, {name: planes / np.float32(subject.recipe.scale)})
    expected = textbook(head[0], subject.recipe)

    assert len(expected.scores) > 0
    for batch in (canvas[None], np.stack([canvas[::-1], canvas])):
        assert_same(detect(subject.session, batch)[-1], expected)


def engine_key(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return what ONNX Runtime finds a TensorRT engine by: the names of inputs and of the results of nodes."""
    return *(value.name for value in model.graph.input), *(result for node in model.graph.node for result in node.output)


def test_engine_cache_tells_all_composed_models_apart() -> None:
    heads = [yolo_head((50, 50, 20, 20, 0, score)) for score in (0.4, 0.5)]
    recipes = [YOLO, *(msgspec.structs.replace(YOLO, **option) for option in ({"iou": 0.6}, {"scale": 1.0}, {"channels": "BGR"}))]
    models = [compose_model(network(head), recipe) for head in heads for recipe in recipes]
    models.append(compose_model(network(heads[0]), YOLO, batch=1))
    wide = msgspec.structs.replace(YOLO, size=(2 * SQUARE, SQUARE // 2))
    models.append(compose_model(network(heads[0], f"float[1, 3, {SQUARE // 2}, {2 * SQUARE}] images"), wide))
    keys = [engine_key(model) for model in models]

    assert len({*keys}) == len({model.graph.name for model in models}) == len(models)
    assert engine_key(compose_model(network(heads[0]), YOLO)) == keys[0]


def test_rows_are_sorted_by_score_and_the_rest_is_zero() -> None:
    head = yolo_head((50, 50, 20, 20, 0, 0.4), (150, 50, 20, 20, 1, 0.9), (50, 150, 20, 20, 2, 0.6))
    blank = np.zeros((2, SQUARE, SQUARE, 3), np.uint8)
    model = session(compose_model(exported({"output0": head}), YOLO))
    count, boxes, scores, classes = (tensor[0] for tensor in outputs(model, blank))

    assert count == 3
    assert classes[:3].tolist() == [1, 2, 0]
    assert scores[:3] == pytest.approx(np.array([0.9, 0.6, 0.4]))
    assert boxes[:3].tolist() == [[140, 40, 160, 60], [40, 140, 60, 160], [40, 40, 60, 60]]
    assert not any(tensor[3:].any() for tensor in (boxes, scores, classes))
    empty = outputs(session(compose_model(exported({"output0": yolo_head()}), YOLO)), blank)
    assert [tensor.shape for tensor in empty] == [(2, 1), (2, 300, 4), (2, 300), (2, 300)]
    assert not any(tensor.any() for tensor in empty)


@pytest.mark.parametrize(
    ("second", "classes"),
    [
        pytest.param((50, 50, 20, 20, 1, 0.8), [1], id="same class, same place"),
        pytest.param((50, 50, 20, 20, 2, 0.8), [1, 2], id="another class, same place"),
        pytest.param((57, 50, 20, 20, 1, 0.8), [1, 1], id="same class, overlap 0.48"),
        pytest.param((56, 50, 20, 20, 1, 0.8), [1], id="same class, overlap 0.54"),
        pytest.param((150, 50, 20, 20, 1, MIN_SCORE), [1], id="at the floor"),
        pytest.param((150, 50, 20, 20, 1, MIN_SCORE + 0.001), [1, 1], id="above the floor"),
    ],
)
def test_box_that_covers_a_better_one_of_its_class_is_dropped(
    second: tuple[float, float, float, float, int, float], classes: list[int]
) -> None:
    assert answer(yolo_head((50, 50, 20, 20, 1, 0.9), second)).classes.tolist() == classes


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
@pytest.mark.parametrize("head", ["yolo", "yolov5", "yolox", "end_to_end", "rtdetr", "rtdetr_topk", "rfdetr", "dfine"])
def test_every_head_is_decoded_as_in_a_textbook(
    head: DetectionHeadName, properties: dict[str, Any], kept_batch: int | None
) -> None:
    recipe = DetectionRecipe(size=WIDE, head=head, iou=0.5)
    tensors = head_tensors(head, WIDE if head in ("yolo", "yolov5", "end_to_end") else (1, 1))
    if properties.get("half"):
        tensors = {name: tensor if tensor.dtype == np.int64 else tensor.astype(np.float16) for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model = compose_model(exported(tensors, WIDE, **properties), recipe, shapes=shapes, batch=kept_batch)
    images = np.zeros((kept_batch or 2, *WIDE[::-1], 3), np.uint8)

    objects = objects_of(tensors, recipe)
    assert len(objects.scores) > 20
    assert [tensor.shape[1] for tensor in outputs(session(model), images)] == [1, 300, 300, 300]  # as configs say
    for found in detect(session(model), images):
        assert_same(found, objects)
        assert found.scores.tolist() == sorted(found.scores, reverse=True)


@pytest.mark.parametrize("head", ["yolo", "yolov5", "end_to_end"])
def test_boxes_may_be_fractions(head: DetectionHeadName) -> None:
    own = DetectionRecipe(size=WIDE, head=head, iou=0.5, box_units="normalized")
    tensors = head_tensors(head)
    (found,) = run(compose_model(exported(tensors, WIDE), own), size=WIDE)

    assert len(found.scores) > 20
    assert_same(found, objects_of(tensors, own))


@pytest.mark.parametrize(("classes", "found"), [(None, [1, 0]), (2, [1, 0]), (3, [2, 1, 0])])
def test_query_may_be_of_several_classes(classes: int | None, found: list[int]) -> None:
    """The last column of `rfdetr` is a class if all of them are."""
    tensors = {"dets": np.array([[0.5, 0.5, 0.2, 0.2]]), "labels": np.array([[-1.0, 1.0, 2.0]])}
    model = compose_model(exported(tensors), DetectionRecipe(size=(SQUARE, SQUARE), head="rfdetr"), classes=classes)
    (seen,) = run(model)

    assert seen.classes.tolist() == found


def reshaped(sizes: Sequence[int], batch: int | str) -> onnx.ModelProto:
    """Make a network that reshapes a head before it returns it."""
    model = exported({"flat": [7 * ANCHORS]}, batch=batch)
    model.graph.node.append(helper.make_node("Reshape", ["flat", "sizes"], ["output0"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(sizes, np.int64), "sizes"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("output0", TensorProto.FLOAT, [batch, 7, ANCHORS]))
    return model


@pytest.mark.parametrize(("sizes", "batch"), [((1, 7, ANCHORS), 1), ((1, 7, -1), 1), ((-1, 7, ANCHORS), "batch")])
def test_batch_of_one_is_made_dynamic(sizes: Sequence[int], batch: int | str) -> None:
    model = session(compose_model(reshaped(sizes, batch), YOLO))

    assert outputs(model, np.zeros((3, SQUARE, SQUARE, 3), np.uint8))[0].shape == (3, 1)


@pytest.mark.parametrize("opset", [13, 22])
def test_opset_is_that_of_the_network_or_the_oldest_supported(opset: int) -> None:
    model = compose_model(network(yolo_head((50, 50, 20, 20, 1, 0.9)), opset=opset), YOLO)
    (found,) = run(model)

    assert [entry.version for entry in model.opset_import] == [max(OPSET, opset)]
    assert model.ir_version == IR_VERSION
    assert found.boxes.tolist() == [[40, 40, 60, 60]]


@pytest.mark.parametrize(
    ("published", "recipe", "message"),
    [
        (network(yolo_head(), "float[1, 3, 320, 320] images"), YOLO, "input"),
        (network(yolo_head(), "double[1, 3, 256, 256] images"), YOLO, "input"),
        (network(yolo_head(), "float[1, 3, 256, 256] images, float[1] other"), YOLO, "expected 1 input .*, found 2 and 1"),
        (network(np.zeros((7, 2100), np.float32)), YOLO, "is not a yolo head"),
        (network(yolo_head()), msgspec.structs.replace(YOLO, head="yolox"), "is not a yolox head"),
    ],
)
def test_network_that_does_not_fit_the_recipe_is_rejected(
    published: onnx.ModelProto, recipe: DetectionRecipe, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compose_model(published, recipe)


MEANS = "network (float[1, 3, 64, 64] images) => ({}) {{ output = ReduceMean <axes = [2, 3], keepdims = 0> (images) }}"
LOGITS = ClassificationRecipe(size=(64, 64), head="logits", scale=51.0)
AS_THEY_ARE = ClassificationRecipe(size=(64, 64), head="probabilities", channels="BGR", mean=(0.1, 0.2, 0.3), std=(0.5, 1, 2))


@pytest.mark.parametrize(("recipe", "expected"), [(LOGITS, [0.01715, 0.04661, 0.93624]), (AS_THEY_ARE, [1.8, 0.2, -0.05])])
def test_classes_have_probabilities_and_channels_their_own_mean_and_deviation(
    recipe: ClassificationRecipe, expected: list[float]
) -> None:
    image = np.full((1, 64, 64, 3), (51, 102, 255), np.uint8)
    (probabilities,) = session(compose_model(parse(MEANS.format("float[1, 3] output")), recipe)).run(None, {"image": image})

    assert probabilities == pytest.approx(np.array([expected]), abs=1e-4)


@pytest.mark.parametrize("output", ["float[1, 1] output", "float[1, n] output"])
def test_classifier_has_a_number_for_each_class(output: str) -> None:
    with pytest.raises(ValueError, match="is not a number for each class"):
        compose_model(parse(MEANS.format(output)), LOGITS)
