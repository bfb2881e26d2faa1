"""What is recognised of exported networks, what the user is asked, and networks whose task has to be named."""

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from app.imaging.fit import canvas_size, fit_for
from app.model.spec import ModelSpec
from app.model.triton_config import ScoreKind
from app.zoo import inference
from app.zoo.compose import compose_model, use_known_names
from app.zoo.recipe import SIZES, ClassificationRecipe
from app.zoo.recognize import Options, Unrecognized, recognize
from app.zoo.repository import Repository
from tests.zoo import adding
from tests.zoo.adding import new_repository  # noqa: F401 - a fixture
from tests.zoo.exported import WIDE, exported, head_tensors, parse

ANCHORS = 1344
"""At 256 x 256 pixels; 1360 with a stride of 64."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ULTRALYTICS = {"author": "Ultralytics", "task": "detect", "stride": 32, "imgsz": [256, 256]}

Shapes = dict[str, tuple[int, ...]]


def names(count: int) -> dict[int, str]:
    return {index: f"class {index}" for index in range(count)}


def one(*shape: int) -> Shapes:
    return {"output0": shape}


@pytest.mark.parametrize(
    ("outputs", "metadata", "head"),
    [
        (one(3 * ANCHORS, 8), {"names": names(3), "stride": 32}, "yolov5"),
        (one(1360, 8), {"names": names(3)}, "yolov5"),
        (one(300, 6), {"names": names(80)}, "end_to_end"),
        (one(300, 6), {**ULTRALYTICS, "names": names(2), "args": {"nms": True}}, "end_to_end"),
        (one(300, 6), {**ULTRALYTICS, "names": names(2), "head": "RTDETRDecoder"}, "rtdetr_topk"),
        (one(300, 7), {**ULTRALYTICS, "names": names(3)}, "rtdetr"),
        ({"labels": (300, 4), "dets": (300, 4)}, {"names": names(3)}, "rfdetr"),
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


def table(head: str, unit: tuple[int, int] | None = None) -> NDArray[Any]:
    (rows,) = head_tensors(head, unit).values()
    return rows


def said(rows: NDArray[Any], **metadata: Any) -> onnx.ModelProto:  # noqa: ANN401
    """Make a network with one output whose name tells nothing, and three classes unless told otherwise."""
    return exported({"output0": rows}, WIDE, **{"names": names(3), **metadata})


def detr(count: int, head: str = "detr") -> onnx.ModelProto:
    return exported(head_tensors(head), WIDE, names=names(count))


YOLO, DECODED = table("yolo"), table("yolov5")[:672]
OBJECTS = DECODED[:, [0, 1, 2, 3, 5, 4, 6, 7]]
FEW: dict[str, Any] = {**ULTRALYTICS, "names": names(2)}
ROUNDED, LOGITS = (np.vstack([YOLO[:4], YOLO[4:] - less]) for less in (0.004, 9))
CHOSEN = {"channels": "RGB", "scale": 255.0, "mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 3.0), "resize": "stretch", "iou": 0.4}


@pytest.mark.parametrize(
    ("network", "options", "expected"),
    [
        (said(YOLO), {}, {"head": "yolo", "iou": 0.7, "box_units": "pixels"}),
        (said(YOLO.T, task="detect"), {}, {"head": "yolo"}),
        (said(ROUNDED), {}, {"head": "yolo"}),
        (said(YOLO[:, :100]), {"head": "yolo"}, {"head": "yolo"}),  # of other strides
        (said(table("yolo", (1, 1))), {}, {"head": "yolo", "box_units": "normalized"}),
        (said(table("deepstream")), {}, {"head": "deepstream", "iou": 0.45}),
        (said(DECODED), {}, {"head": "yolov5", "iou": 0.45, "channels": "RGB"}),
        (said(table("yolox")), {}, {"head": "yolox", "iou": 0.45, "channels": "BGR", "scale": 1.0, "placement": "top_left"}),
        (said(table("yolox")), CHOSEN, CHOSEN),
        (said(table("rtdetr_topk"), **FEW), {}, {"head": "rtdetr_topk"}),
        (said(table("rtdetr")), {"head": "rtdetr"}, {"head": "rtdetr", "resize": "stretch"}),
        (said(table("end_to_end", (1, 1)), **FEW), {}, {"head": "end_to_end", "box_units": "normalized"}),
        (detr(3), {}, {"head": "detr", "resize": "letterbox", "placement": "top_left", **IMAGENET}),
    ],
)
def test_rows_for_a_picture_tell_what_shapes_do_not(
    network: onnx.ModelProto, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    recipe = recognize(network, Options(**options)).recipe
    assert {name: getattr(recipe, name) for name in expected} == expected


def ninety_one(best: int) -> onnx.ModelProto:
    """Make an RF-DETR of 91 columns, of which one is always the best, and 90 names."""
    rows = np.vstack([np.zeros((20, 91)), np.tile(np.eye(91)[best], (20, 1))])
    return exported({"dets": np.full((40, 4), 0.5), "labels": rows}, names=names(90))


@pytest.mark.parametrize(("best", "label"), [(0, "class 0"), (90, "N/A")])
def test_column_of_no_class_is_never_the_best_one(best: int, label: str) -> None:
    assert recognize(ninety_one(best), Options()).labels[0] == label


def turned(kind: int) -> onnx.ModelProto:
    """Make a D-FINE whose second input has another name and type, and the height first; its classes are INT32."""
    tensors = head_tensors("dfine")
    network = exported({**tensors, "labels": tensors["labels"].astype(np.int32)}, WIDE, names=names(3))
    (concat,) = (node for node in network.graph.node if SIZES in node.input)
    concat.input[:] = ["turned"] * 2
    network.graph.node.insert(0, helper.make_node("Gather", ["im_shape", "order"], ["turned"], axis=1))
    network.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 0]), "order"))
    network.graph.input[1].name, network.graph.input[1].type.tensor_type.elem_type = "im_shape", kind
    return network


def test_tensors_of_others_have_another_order_and_other_names_and_types(repository: Repository) -> None:
    others = zip(
        ("num_predictions", "pred_boxes", "pred_scores", "pred_classes"), head_tensors("four_tensors").values(), strict=True
    )
    networks = [
        exported(head_tensors("dfine"), WIDE, names=names(3)),
        *map(turned, (1, 6)),
        exported(dict(others), WIDE, names=names(3)),
    ]
    found = []
    for index, network in enumerate(networks):
        adding.added(network, repository, f"a{index}")
        found.append(adding.blank_outputs(repository, f"a{index}")["det_boxes"][0, :20])
    assert np.array([found[0]] * 2) == pytest.approx(np.array(found[1:3]))
    assert found[3].max() > 100


def test_size_is_the_fixed_one_or_the_users_or_the_exporters() -> None:
    fixed, variable = (256, 128), ("width", "height")
    for size, exporter, said in ((fixed, [640, 640], fixed), (variable, [128, 256], None), (variable, [640, 640], fixed)):
        network = exported(one(20, 6), size, symbolic=True, imgsz=exporter)
        assert recognize(network, Options(size=said, labels=("a",))).recipe.size == fixed


def test_squares_of_ultralytics_whose_sides_are_dynamic_have_rectangles() -> None:
    upright, dynamic = ((256, 192), (192, 256)), {"width": "width", "author": "Ultralytics", "stride": 32}
    for differing, shapes in (
        ({}, ((256, 160), (160, 256), *upright)),
        ({"stride": 64}, upright),
        ({"imgsz": [128, 256]}, ()),
        ({"author": "Megvii"}, ()),
        ({"width": 256}, ()),
    ):
        given: dict[str, Any] = {**ULTRALYTICS, "names": names(2), "args": {"nms": True}, **dynamic, **differing}
        network = exported(one(300, 6), (given.pop("width"), "height"), **given)
        assert recognize(network, Options()).recipe.shapes == shapes


def test_versions_have_rectangles_if_all_can_have_them(repository: Repository) -> None:
    """Of a network with an anchor for each cell; production has squares, because an engine is for one size."""
    weights = np.array([[150, 0, 60], [0, 150, 80], [0, 0, 9], [6, 0, 0], [0.3, 0.2, 0.3], [0.1, 0.3, 0.1]], np.float32)
    cells = [
        f"p{side} = AveragePool <kernel_shape = [{side}, {side}], strides = [{side}, {side}]> (images)"
        f"\n c{side} = Conv (p{side}, weights)\n r{side} = Reshape (c{side}, rows)"
        for side in (8, 16, 32)
    ]
    for version, sides in enumerate(("height, width", "256, 256"), 1):
        body = "\n".join(("rows = Constant <value_ints = [0, 6, -1]> ()", *cells, "output0 = Concat <axis = 2> (r8, r16, r32)"))
        network = parse(f"network (float[batch, 3, {sides}] images) => (float[batch, 6, anchors] output0) {{ {body} }}")
        network.graph.initializer.append(numpy_helper.from_array(weights[:, :, None, None], "weights"))
        helper.set_model_props(network, {key: str(value) for key, value in {**ULTRALYTICS, "names": names(2)}.items()})
        adding.added(network, repository)
        embedded, production = (adding.spec_of(repository, is_embedded=each) for each in (True, False))
        assert (len(embedded.shapes), production.shapes, production.image_shape) == (4 * (version == 1), (), (256, 256, 3))


@pytest.mark.parametrize(
    ("metadata", "scores", "head", "preprocessing"),
    [
        ({}, "Identity", "logits", {"crop": 0.875, **IMAGENET}),
        ({}, "Softmax <axis = 1>", "probabilities", {"crop": 0.875, **IMAGENET}),
        ({}, "Sigmoid", "probabilities", {"crop": 0.875, **IMAGENET}),
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


NETWORKS = {
    "text_detection": """
        map (float[batch, 3, height, width] x) => (float[batch, 1, height, width] y) {
            grey = ReduceMean <axes = [1]> (x)
            y = Sigmoid (grey)
        }""",
    "text_recognition": """
        read (float[batch, 3, 48, width] x) => (float[batch, steps, 5] y) {
            parts = AveragePool <kernel_shape = [48, 8], strides = [48, 8]> (x)
            rows = Constant <value_ints = [2]> ()
            colours = Squeeze (parts, rows)
            steps = Transpose <perm = [0, 2, 1]> (colours)
            missing = Constant <value_ints = [0, 0, 1, 0, 0, 1]> ()
            logits = Pad (steps, missing)
            y = Softmax <axis = 2> (logits)
        }""",
    "embedding": """
        describe (float[batch, 3, 64, 64] x) => (float[batch, 3] y) {
            mean = GlobalAveragePool (x)
            y = Flatten (mean)
        }""",
}

ASKED = "^does not tell the format of its output: say --head "
VARIABLE, SMALL = "float[n, 3, h, w]", {"size": (64, 64)}


def same(takes: str, *others: str, made: str = "Identity", of: str = "") -> onnx.ModelProto:
    """Make a network that returns its images, perhaps in another shape."""
    inputs, given = ", ".join((f"{takes} images", *others)), "(images, shape)" if of else "(images)"
    return parse(f"network ({inputs}) => ({'float' if of else takes} output) <{of}> {{ output = {made} {given} }}")


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (exported(one(7, ANCHORS), ("w", "h")), {}, "say --size 640, or --size 640x384"),
        (exported(one(7, ANCHORS), batch=8), {}, "takes only batches of 8 images"),
        (exported(one(7, ANCHORS)), {}, "does not name 3 classes: say --labels a,b,c or --labels names.txt"),
        (exported(one(7, ANCHORS), names=names(80)), {}, "has 3 classes, not 80: say --labels a,b,c"),
        (exported(one(7, ANCHORS)), {"head": "yolox"}, r"output0 \(7, 1344\) with 256 x 256 pixels, which do not fit --head yolox"),
        (exported(one(ANCHORS, 8), names=names(3)), {}, f"{ASKED}yolov5 or --head yolox$"),
        (said(DECODED, names=names(4)), {}, f"{ASKED}yolo or --head yolov5$"),  # or YOLOv8, transposed
        (said(OBJECTS, names=names(4)), {}, "has 3 classes, not 4: say"),
        (said(OBJECTS.T, names=names(4)), {}, "its first score is an objectness, and not that of a class"),
        (said(table("yolov5")[:, :6], names=names(2)), {}, "has 1 class, not 2: say"),
        (exported(one(300, 6), **FEW), {}, f"{ASKED}end_to_end or --head rtdetr or --head rtdetr_topk$"),
        (exported(one(300, 7), names=names(3)), {}, f"{ASKED}rtdetr$"),  # or oriented boxes
        (exported(one(20, 21504)), {}, "do not fit a known head"),
        (exported(one(0, 6)), {"head": "rtdetr_topk"}, "which do not fit --head rtdetr_topk"),
        (onnx.ModelProto(), {}, "cannot be loaded: "),
        (said(LOGITS), {}, "cannot be served: its scores are logits, such as -9.0: export it with its sigmoid"),
        (said(table("deepstream"), names=names(1)), {"head": "yolov5"}, "does not fit --head yolov5: its boxes are x1 y1 x2 y2"),
        (said(DECODED), {"head": "yolox"}, "its boxes are decoded"),
        (said(table("yolox")), {"head": "yolov5"}, "negative sizes, as those of a raw YOLOX"),
        (said(table("rtdetr_topk")), {"head": "end_to_end"}, "its boxes are not x1 y1 x2 y2"),
        (said(table("end_to_end") + 0.5), {"head": "end_to_end"}, "its last column is not a class"),
        (said(table("rtdetr", WIDE)), {"head": "rtdetr"}, "its boxes are no fractions of the input"),
        (said(table("yolo", (1, 1))), {"box_units": "pixels"}, "has boxes in fractions of the input: leave out --box-units"),
        (said(np.vstack([table("yolo", (1, 1)), YOLO[:1]]), task="obb"), {}, "as only detectors may have; export it with boxes in"),
        (detr(4), {}, "has 3 classes, not 4: say"),
        (detr(4), {"head": "detr_sigmoid"}, "its last column is that of no object"),
        (ninety_one(9), {}, "with 91 names, of which one is N/A"),
        (
            parse(NETWORKS["text_detection"]),
            {"task": "embedding", **SMALL},
            r"y \(1, 64, 64\), which are not those of a network for",
        ),
        (parse(NETWORKS["text_recognition"]), {"task": "text_recognition", "labels": ("a", "b")}, "not those of 2 characters: say"),
        (same("float[1, 64, 64, 3]"), {}, "must take one image"),
        (same("float[1, 3, 64, 64]", "float[1] other"), {}, "images .* and other "),
        (same("float[1, 3, 64, 64]", "float[1, 2] im_shape", "float[1, 2] scale_factor"), {}, "im_shape .* and scale_factor "),
        (same(VARIABLE, made="Reshape", of="int64[2] shape = {1, 7}"), SMALL, "does not run with 64 x 64 pixels"),
    ],
)
def test_user_is_told_what_to_do(network: onnx.ModelProto, options: dict[str, Any], message: str) -> None:
    use_known_names(network)
    with pytest.raises(Unrecognized, match=message) as caught:
        recognize(network, Options(**options))

    assert "\n" not in str(caught.value)


CHARACTERS = ("a", "b", "\u3000")


def added(task: str, repository: Repository, **options: str) -> ModelSpec:
    model = parse(NETWORKS[task])
    helper.set_model_props(model, {"character": "\n".join(CHARACTERS)})
    adding.added(model, repository, task=task, **options)
    return adding.spec_of(repository)


def run(repository: Repository, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Run the composed model with images UINT8 (batch, height, width, 3)."""
    return [*inference.run(inference.open_session(repository.path / "doors/1/model.onnx"), {"image": images}).values()]


def size_for(spec: ModelSpec, width: int, height: int) -> tuple[int, int]:
    fit = fit_for(spec)
    return canvas_size(fit, fit.fit(width, height))


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_map_of_text_has_the_size_of_the_image(repository: Repository) -> None:
    """Each probability is rounded to a part of 255, so that more than 0.3 is more than 76 of it."""
    spec = added("text_detection", repository)
    images = noise(2, 96, 160, 3)
    (found,) = run(repository, images)

    assert (spec.head.task, spec.labels, spec.output_names) == ("text_detection", (), ("text_map",))
    assert size_for(spec, 500, 1000) == (736, 1472)
    assert found.dtype == np.uint8
    assert found.shape == (2, 96, 160)
    probability = 1 / (1 + np.exp(-(images / 127.5 - 1).mean(axis=3)))
    assert np.abs(found - 255 * probability).max() <= 0.51
    clear = np.abs(probability - 0.3) > 1e-5
    assert ((found > 76) == (probability > 0.3))[clear].all()


def test_line_of_text_has_a_class_and_a_score_for_each_step(repository: Repository) -> None:
    """The blank is before the characters, a space after them; a Chinese space is a character of the file."""
    spec = added("text_recognition", repository)
    images = np.full((2, 48, 320, 3), 127, np.uint8)
    images[0, :, :8] = 0, 0, 255
    images[1, :, 8:16] = 255, 0, 0
    classes, scores = run(repository, images)

    assert spec.labels == ("", *CHARACTERS, " ")
    assert (spec.head.task, spec.output_names, spec.widths, spec.pad) == (
        *("text_recognition", ("classes", "scores")),
        *((160, 320, 480, 640, 960, 1280), 127),
    )
    assert size_for(spec, 400, 100) == (320, 48)
    assert (str(classes.dtype), str(scores.dtype), classes.shape, scores.shape) == ("int32", "float32", (2, 40), (2, 40))
    assert [spec.labels[number] for number in (classes[0, 0], classes[1, 1])] == ["a", "\u3000"]  # blue is first
    assert scores[0, 0] == pytest.approx(np.e / (np.e + 2 + 2 / np.e), abs=1e-5)


def test_vector_of_an_image(repository: Repository) -> None:
    spec = added("embedding", repository, mean="0,0,0", std="1,1,1")
    images = noise(3, 64, 64, 3)

    assert (spec.head.task, spec.head.description, spec.resize) == ("embedding", "vector of 3 values", "stretch")
    assert run(repository, images)[0] == pytest.approx(images.mean(axis=(1, 2)) / 255, abs=1e-5)
