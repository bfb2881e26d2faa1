"""What is recognised of exported networks, and what the user is asked."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from app.model.triton_config import ScoreKind
from app.zoo import registry
from app.zoo.compose import compose_model
from app.zoo.recipe import ClassificationRecipe, DetectionHeadName, DetectionRecipe, Recipe
from app.zoo.recognize import Options, Unrecognized, recognize
from tests.zoo.exported import exported, parse

ANCHORS = 1344
"""At 256 x 256 pixels; 1360 with a stride of 64, and 5440 with one of 4."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ULTRALYTICS = {"task": "detect", "stride": 32, "imgsz": [256, 256]}

Shapes = dict[str, tuple[int, ...]]


def names(count: int) -> dict[int, str]:
    return {index: f"class {index}" for index in range(count)}


def one(*shape: int) -> Shapes:
    return {"output0": shape}


@pytest.mark.parametrize(
    ("outputs", "metadata", "head"),
    [
        (one(7, ANCHORS), {"names": names(3)}, "yolo"),
        (one(7, 5440), {"names": names(3)}, "yolo"),
        (one(3 * ANCHORS, 8), {"names": names(3), "stride": 32}, "yolov5"),
        (one(1360, 8), {"names": names(3)}, "yolov5"),
        (one(300, 6), {"names": names(80)}, "end_to_end"),
        (one(300, 6), {**ULTRALYTICS, "names": names(2), "args": {"nms": True}}, "end_to_end"),
        (one(300, 6), {**ULTRALYTICS, "names": names(2), "head": "RTDETRDecoder"}, "rtdetr_topk"),
        (one(300, 7), {**ULTRALYTICS, "names": names(3)}, "rtdetr"),
        ({"labels": (300, 4), "dets": (300, 4)}, {"names": names(3)}, "rfdetr"),
        ({"labels": (300, 91), "dets": (300, 4)}, {"names": names(91)}, "rfdetr"),
    ],
)
def test_head_is_that_of_the_shape_and_the_names(outputs: Shapes, metadata: dict[str, Any], head: str) -> None:
    network = exported(outputs, **metadata)
    recipe, labels, shapes, *_ = recognize(network, Options())
    compose_model(network, recipe, shapes=shapes, classes=len(labels))

    assert (recipe.head, recipe.size, recipe.channels, recipe.scale) == (head, (256, 256), "RGB", 255.0)
    assert recipe.resize == ("stretch" if head in ("rtdetr", "rtdetr_topk", "rfdetr") else "letterbox")
    assert (recipe.mean, recipe.std) == ((*IMAGENET.values(),) if head == "rfdetr" else ((0.0,) * 3, (1.0,) * 3))
    assert labels == tuple(metadata["names"].values())
    assert shapes == outputs


@pytest.mark.parametrize(
    ("outputs", "metadata", "heads"),
    [
        pytest.param(one(ANCHORS, 8), {"names": names(3)}, ["yolov5", "yolox"], id="decoded or not"),
        pytest.param(one(300, 6), {**ULTRALYTICS, "names": names(80)}, ["end_to_end", "rtdetr_topk"], id="corners or centres"),
        pytest.param(
            one(300, 6), {**ULTRALYTICS, "names": names(2)}, ["end_to_end", "rtdetr", "rtdetr_topk"], id="and two classes"
        ),
        pytest.param(one(300, 7), {"names": names(3)}, ["rtdetr"], id="three classes, or an angle"),
    ],
)
def test_ambiguous_head_is_asked(outputs: Shapes, metadata: dict[str, Any], heads: list[DetectionHeadName]) -> None:
    question = "does not tell the format of its output: say " + " or ".join(f"--head {head}" for head in heads)
    with pytest.raises(Unrecognized, match=f"^{question}$"):
        recognize(exported(outputs, **metadata), Options())

    for head in heads:
        recipe = recognize(exported(outputs, **metadata), Options(head=head)).recipe
        assert recipe.head == head


def test_labels_decide_where_shapes_collide() -> None:
    """84 columns are also the anchors of an input of 64 x 64 pixels, and 84 rows the channels of 80 classes."""
    square = exported(one(84, 84), (64, 64))

    assert recognize(square, Options(labels=tuple(names(80).values()))).recipe.head == "yolo"
    with pytest.raises(Unrecognized, match=r"say --head yolov5 or --head yolox$"):
        recognize(square, Options(labels=tuple(names(79).values())))


def test_yolox_takes_its_usual_pixels_unless_told_otherwise() -> None:
    network = exported(one(ANCHORS, 8))
    options = {"head": "yolox", "labels": ("a", "b", "c")}

    recipe = recognize(network, Options(**options)).recipe  # type: ignore[arg-type]
    assert (recipe.channels, recipe.scale, recipe.placement) == ("BGR", 1.0, "top_left")
    said = {"channels": "RGB", "scale": 255.0, "mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 3.0), "resize": "stretch", "iou": 0.4}
    recipe = recognize(network, Options(**options, **said)).recipe  # type: ignore[arg-type]
    assert {name: getattr(recipe, name) for name in said} == said


@pytest.mark.parametrize(
    ("size", "metadata", "said", "expected"),
    [
        ((256, 128), {"imgsz": [640, 640]}, (256, 128), (256, 128)),
        (("width", "height"), {"imgsz": [128, 256]}, None, (256, 128)),
        (("width", "height"), {"imgsz": [640, 640]}, (256, 128), (256, 128)),
    ],
)
def test_size_is_the_fixed_one_or_the_users_or_the_exporters(
    size: tuple[int | str, int | str], metadata: dict[str, Any], said: tuple[int, int] | None, expected: tuple[int, int]
) -> None:
    network = exported(one(20, 6), size, symbolic=True, **metadata)
    assert recognize(network, Options(size=said, labels=("a",))).recipe.size == expected


@pytest.mark.parametrize(
    ("metadata", "scores", "head", "preprocessing"),
    [
        ({}, "Identity", "logits", {"crop": 0.875, **IMAGENET}),
        ({}, "Softmax <axis = 1>", "probabilities", {"crop": 0.875, **IMAGENET}),
        ({"task": "classify"}, "Identity", "probabilities", {"crop": 1.0}),
    ],
)
def test_classifier_is_recognised(metadata: dict[str, str], scores: str, head: ScoreKind, preprocessing: dict[str, Any]) -> None:
    network = parse(f"""network (float[1, 3, 64, 64] images) => (float[1, 3] output) {{
        means = ReduceMean <axes = [2, 3], keepdims = 0> (images)
        output = {scores} (means)
    }}""")
    onnx.helper.set_model_props(network, {**metadata, "names": str(names(3))})

    recipe = recognize(network, Options()).recipe
    assert recipe == ClassificationRecipe(size=(64, 64), head=head, resize="center_crop", **preprocessing)
    assert recognize(network, Options(head="logits")).recipe.head == "logits"


VARIABLE, SMALL = "float[n, 3, h, w]", {"size": (64, 64)}


def same(takes: str, *others: str, made: str = "Identity", of: str = "") -> onnx.ModelProto:
    """Make a network that returns its images, perhaps in another shape."""
    inputs, given = ", ".join((f"{takes} images", *others)), "(images, shape)" if of else "(images)"
    return parse(f"network ({inputs}) => ({'float' if of else takes} output) <{of}> {{ output = {made} {given} }}")


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (exported(one(7, ANCHORS), ("w", "h")), {}, "say --size 640, or --size 640x384"),
        (exported(one(7, ANCHORS)), {"size": (320, 256)}, "takes 256 x 256 pixels: leave out --size"),
        (exported(one(7, ANCHORS), batch=8), {}, "takes only batches of 8 images"),
        (exported(one(7, ANCHORS)), {}, "does not name 3 classes: say --labels a,b,c or --labels names.txt"),
        (exported(one(7, ANCHORS), names=names(80)), {}, "has 3 classes, not 80: say --labels a,b,c"),
        (exported({"dets": (9, 4), "labels": (9, 91)}), {"labels": ("a",)}, "has 90 or 91 classes, not 1: "),
        (exported(one(7, ANCHORS)), {"head": "yolox"}, r"output0 \(7, 1344\) with 256 x 256 pixels, which do not fit --head yolox"),
        (exported(one(20, 21504)), {}, "do not fit a known head"),
        (onnx.ModelProto(), {}, "cannot be loaded: "),
        (same("float[1, 64, 64, 3]"), {}, "must take one image"),
        (same("float[1, 3, 64, 64]", "float[1] other"), {}, "images .* and other "),
        (same(VARIABLE, made="Squeeze", of="int64[1] shape = {0}"), SMALL, "outputs without the dimension of the batch"),
        (same(VARIABLE, made="Reshape", of="int64[2] shape = {1, 7}"), SMALL, "does not run with 64 x 64 pixels"),
    ],
)
def test_user_is_told_what_to_do(network: onnx.ModelProto, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unrecognized, match=message) as caught:
        recognize(network, Options(**options))

    assert "\n" not in str(caught.value)


def test_published_network_is_recognised(networks: dict[str, Path]) -> None:
    recipe, labels, shapes, *_ = recognize(onnx.load(networks["yolo11n"]), Options())

    assert recipe == DetectionRecipe(size=(640, 640), head="yolo")
    assert (len(labels), labels[0]) == (80, "person")
    assert shapes == one(84, 8400)


RECIPE = """
task = "detection"
size = [640, 640]
channels = "RGB"
scale = 255.0
head = "yolo"
iou = 0.7
"""


def test_registry_of_the_project_is_valid() -> None:
    entries = registry.load()

    assert "yolo11n" in entries
    for entry in entries.values():
        assert [entry.url, entry.wheel, entry.npm].count(None) == 2
        assert bool(entry.member) != bool(entry.url)
        assert entry.recipe.architecture or entry.file_name.endswith(".onnx")
    assert [*registry.select(entries, "ocr")] == ["ocr_detection", "ocr_direction", "ocr_recognition"]


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        pytest.param("size = [640, 640]", "size = [640, 0]", "size", id="too small"),
        pytest.param('task = "detection"', 'task = "ranking"', "task", id="unknown task"),
        pytest.param('task = "detection"', 'task = "classification"', "head", id="recipe of another task"),
        pytest.param(
            'task = "detection"', 'task = "detection"\narchitecture = "resnet"', "architecture", id="unknown architecture"
        ),
        pytest.param("scale = 255.0", 'scale = 255.0\nresize = "line"', "resize", id="line of text"),
    ],
)
def test_invalid_recipe_says_where(right: str, wrong: str, place: str) -> None:
    assert isinstance(msgspec.convert(tomllib.loads(RECIPE), Recipe), DetectionRecipe)
    with pytest.raises(msgspec.ValidationError, match=place):
        msgspec.convert(tomllib.loads(RECIPE.replace(right, wrong)), Recipe)
