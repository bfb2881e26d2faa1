"""What the gateway derives from a model's Triton config: its head, its input, its parameters; and the configs that it refuses."""

import math
import re
from typing import Any

import msgspec
import pytest

from app.errors import UnsupportedModel
from app.model.heads import ClassificationHead, DetectionHead, OutputFormat
from app.model.spec import InputFormat, are_interchangeable, from_triton_config
from app.model.triton_config import ModelParameters
from tests.fakes.triton import SPEC
from tests.model.configs import END_TO_END, FILE, IMAGES, RTDETR, SIX_COLUMNS, VARIABLE, YOLO, YOLOX, Tensor, config, spec_of, table
from tests.support import ROOT

SCORES, PROTOTYPES = table(1000), table(32, 160, 160, name="masks")


def names(count: int) -> str:
    """Return `labels` for so many classes."""
    return ",".join(map(str, range(count)))


@pytest.mark.parametrize(
    ("batch", "groups", "images", "device"),
    [
        (8, [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}], 32, "gpu"),
        (8, [{"count": 2, "kind": "KIND_CPU"}, {"kind": "KIND_GPU"}], 24, "gpu"),
        (4, [{"count": 0, "kind": "KIND_AUTO"}], 4, "cpu"),
    ],
)
def test_model_processes_a_full_batch_in_each_instance(batch: int, groups: list[dict[str, Any]], images: int, device: str) -> None:
    spec = from_triton_config(config(batch=batch) | {"instance_group": groups}, "1")

    assert (spec.parallel_images, spec.device) == (images, device)
    assert spec_of(device=device).device == device  # an ensemble has no instances, so a parameter says where it runs


def test_every_parameter_is_read() -> None:
    spec = spec_of(
        image=VARIABLE,
        labels="person,traffic light",
        resize="center_crop",
        crop="0.5",
        placement="top_left",
        enlarge="false",
        pad="0",
        channels="BGR",
        scale="1.5",
        square="416",
        box_units="normalized",
        iou="0.45",
        source="https://example.org/m",
        licence="MIT",
        default_version="3",
    )

    assert spec.labels == ("person", "traffic light")
    assert (spec.resize, spec.crop, spec.placement, spec.enlarge, spec.pad) == ("center_crop", 0.5, "top_left", False, 0)
    assert (spec.channels, spec.scale, spec.input_size) == ("BGR", 1.5, (416, 416))
    assert spec.head == DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=True, iou=0.45, max_iou=0.45)
    assert (spec.source, spec.licence, spec.default_version) == ("https://example.org/m", "MIT", 3)


def test_invalid_parameter_is_named() -> None:
    invalid: list[dict[str, Any]] = [{"scale": "nan"}, {"resize": "fit"}, {"mean": "0,nan,0"}, {"std": "1,1,0"}, {"shapes": "640"}]
    for parameters in invalid:
        with pytest.raises(UnsupportedModel, match=rf"the config of m has an invalid parameter: .*{next(iter(parameters))}"):
            spec_of(**parameters)


@pytest.mark.parametrize(
    ("batch", "data_type", "dims", "layout", "shape"),
    [
        (1, "TYPE_FP32", ["3", "48", "64"], InputFormat.CHW, (3, 48, 64)),  # Triton's JSON has numbers as texts
        (8, "TYPE_UINT8", [48, 64, 3], InputFormat.HWC, (48, 64, 3)),
        (8, "TYPE_FP16", [3, -1, 320], InputFormat.CHW, (3, 640, 320)),
        (0, "TYPE_FP32", [1, 3, 48, 64], InputFormat.CHW, (3, 48, 64)),
    ],
)
def test_layout_shape_and_size_of_the_input(
    batch: int, data_type: str, dims: list[int | str], layout: InputFormat, shape: tuple[int, ...]
) -> None:
    written = [] if batch else [1]
    spec = spec_of(table(*written, 300, 6), image=("images", data_type, dims), batch=batch)

    assert (spec.input_format, spec.image_shape, spec.datatype) == (layout, shape, data_type[5:])
    assert spec.image_bytes == math.prod(shape) * {"TYPE_UINT8": 1, "TYPE_FP16": 2, "TYPE_FP32": 4}[data_type]
    assert spec.batch_shape(2) == (2, *shape)
    alone = spec_of(image=table(4, 6, 3), batch=0)
    assert alone.batch_shape(1) == (4, 6, 3)
    with pytest.raises(ValueError, match=r"^m has no batch dimension$"):
        alone.batch_shape(2)


def test_variable_input_size_is_read_from_the_parameters() -> None:
    """`square` takes precedence over the exporter's `imgsz`; the default is 640. A fixed size takes precedence over both."""
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"metadata": "{'imgsz': (384, 640)}"}, (640, 384)),
        ({"metadata": "{'imgsz': 416}"}, (416, 416)),
        ({"metadata": "{'imgsz': [320, 0]}"}, (640, 640)),
        ({"square": "512", "metadata": "{'imgsz': [384, 640]}"}, (512, 512)),
    ]
    for parameters, input_size in cases:
        assert spec_of(image=VARIABLE, **parameters).input_size == input_size
        assert spec_of(image=table(3, 96, -1), **parameters).input_size == (input_size[0], 96)


def test_shapes_are_those_of_letterboxed_inputs_of_dynamic_size_with_boxes_in_pixels() -> None:
    given: dict[str, Any] = {"image": VARIABLE, "shapes": "640x480,640x384", "box_units": "pixels"}
    assert spec_of(*END_TO_END, **given).shapes == spec_of(YOLO, **given).shapes == ((640, 384), (640, 480))
    assert spec_of(YOLOX, **given).shapes == ()
    for other in ({"image": IMAGES}, {"image": FILE, "square": "640"}, {"resize": "stretch"}, {"box_units": "normalized"}):
        assert spec_of(*END_TO_END, **given | other).shapes == ()


def test_model_that_takes_the_file_has_its_size_in_the_config_and_may_tell_what_it_could_not_decode() -> None:
    """Without the size, the unit of its boxes is unknown."""
    spec = spec_of(*END_TO_END, image=FILE, batch=0, metadata="{'imgsz': [384, 640]}")
    decoded = table(1, name="decoded", data_type="TYPE_INT32")
    telling = spec_of(decoded, *END_TO_END, image=FILE, batch=0, metadata="{'imgsz': [384, 640]}")

    assert (spec.input_format, spec.datatype, spec.input_size) == (InputFormat.FILE, "BYTES", (640, 384))
    assert (spec.image_bytes, spec.batch_shape(1)) == (2**20, (1,))
    assert telling == msgspec.structs.replace(spec, tells_decoded=True)
    assert telling.requested_names == (*spec.output_names, "decoded")
    with pytest.raises(UnsupportedModel, match="m takes the encoded file; its config must say `square`"):
        spec_of(*END_TO_END, image=FILE)


def test_model_that_answers_no_single_image_is_unusable() -> None:
    for fixed in (config(table(16, 300, 6), image=table(16, 3, 640, 640), batch=0), config() | {"sequence_batching": {}}):
        with pytest.raises(UnsupportedModel, match=r"m takes (only batches of 16 images|sequences only)") as caught:
            from_triton_config(fixed, "1")
        assert caught.value.answers_nothing


def test_inputs_of_no_head_are_described() -> None:
    for images in ([table(640, 3, 640)], [table(1, 3, 640, 640)], [table(3, 9, 9, data_type="TYPE_INT32")], [], 2 * [IMAGES]):
        inputs = [{"name": name, "data_type": data_type, "dims": dims} for name, data_type, dims in images]
        with pytest.raises(UnsupportedModel, match=r"match no supported head: inputs (o|images|none)"):
            from_triton_config(config() | {"input": inputs}, "1")


def test_preprocessing_is_that_of_the_published_models() -> None:
    for spec, expected in (
        (spec_of(YOLO), ("letterbox", "RGB", 255.0, "center")),
        (spec_of(YOLOX), ("letterbox", "BGR", 1.0, "top_left")),
        (spec_of(RTDETR, head="rtdetr"), ("stretch", "RGB", 255.0, "center")),
    ):
        assert (spec.resize, spec.channels, spec.scale, spec.placement) == expected


def test_parameters_of_a_classifier_are_read() -> None:
    spec = spec_of(SCORES, interpolation="bicubic", mean="0.485, 0.456, 0.406", std="0.229,0.224,0.225", scores="probabilities")

    assert (spec.interpolation, spec.head) == ("bicubic", ClassificationHead(classes=1000, scores="probabilities"))
    subtrahend, divisor = spec.normalization
    assert subtrahend.ravel().tolist() == pytest.approx([123.675, 116.28, 103.53])
    assert divisor.ravel().tolist() == pytest.approx([58.395, 57.12, 57.375])


def test_models_of_the_same_inputs_and_outputs_are_interchangeable() -> None:
    same = {"version": "2", "device": "gpu", "max_batch": 64, "instances": 4, "licence": "MIT", "default_version": 2}
    assert are_interchangeable(SPEC, msgspec.structs.replace(SPEC, **same))
    for change in ({"input_size": (64, 64)}, {"output_names": ("other",)}, {"labels": ("cat",)}, {"pad": 0}):
        assert not are_interchangeable(SPEC, msgspec.structs.replace(SPEC, **change))


def hints(**parameters: str) -> ModelParameters:
    return msgspec.convert(parameters, ModelParameters, strict=False)


def test_class_names_are_found() -> None:
    """`labels` takes precedence over the exporter's metadata; without either there are no names."""
    rows: list[tuple[dict[str, str], tuple[str, ...]]] = [
        ({"labels": " cat , traffic light "}, ("cat", "traffic light")),
        ({"labels": '["tights, or a jersey", " dog\\u0021"]'}, ("tights, or a jersey", "dog!")),
        ({"labels": "cat [tabby],dog"}, ("cat [tabby]", "dog")),
        ({"labels": "[]", "metadata": "{'names': {0: 'dog'}}"}, ("dog",)),
        ({"metadata": "{'names': {1: 'dog', 0: 'cat'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 7}}"}, ("7",)),
        ({"metadata": '{"names": {"1": "cat", "2": "dog"}, "nms": false, "imgsz": null}'}, ("cat", "dog")),
        ({"labels": "cat\r\ndog\n"}, ("cat", "dog")),
        ({"labels": "cat", "metadata": "{'names': {0: 'dog'}}"}, ("cat",)),
        ({}, ()),
    ]
    for parameters, labels in rows:
        assert hints(**parameters).class_names() == labels


def test_malformed_metadata_leaves_the_defaults_and_labels_that_are_no_json_array_are_rejected() -> None:
    """Split at commas, they would be wrong names."""
    gap, call = "{'names': {0: 'cat', 2: 'dog'}}", "__import__('os').getcwd()"
    for metadata in ("\0", "[1, 2]", gap, "{'names': 3, 'imgsz': {}}", call, "-" * 100_000 + "1"):
        assert (hints(metadata=metadata).class_names(), hints(metadata=metadata).input_size()) == ((), None)
    for labels in ("[cat,dog]", '["cat", 7]', "[" * 5000):
        with pytest.raises(msgspec.ValidationError, match="labels begin with"):
            hints(labels=labels)


def test_every_parameter_is_documented() -> None:
    page = (ROOT / "docs" / "how-to" / "model-config.md").read_text(encoding="utf-8")
    table = page.partition("| parameter | values | default |\n")[2].partition("\n\n")[0]
    listed = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]

    assert sorted(listed) == sorted(ModelParameters.__struct_encode_fields__)


SEGMENT, POSE = (f"{{'task': '{task}', 'kpt_shape': [2, 3]}}" for task in ("segment", "pose"))


def test_model_that_suppresses_boxes_sets_the_maximum_of_their_overlap() -> None:
    """One with four tensors always, one with rows of six if its config tells."""
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any], tuple[float, float]]] = [
        (END_TO_END, {}, (0.7, 0.7)),
        ((SIX_COLUMNS,), {}, (0.7, 1.0)),
        ((SIX_COLUMNS,), {"iou": "0"}, (0.0, 0.0)),
        ((YOLO,), {"iou": "0.45"}, (0.45, 1.0)),
    ]
    for outputs, parameters, expected in cases:
        head = spec_of(*outputs, **parameters).expect_head(DetectionHead)
        assert (head.iou, head.max_iou) == expected


@pytest.mark.parametrize(
    ("output", "parameters", "output_format"),
    [
        (table(-1, 6), {}, OutputFormat.SIX_COLUMNS),
        (table(84, -1), {}, OutputFormat.YOLO_HEAD),
        (table(84, 34000), {}, OutputFormat.YOLO_HEAD),
        (table(8400, 6), {}, OutputFormat.YOLOX_HEAD),
        (table(3 * 8400, 6), {}, OutputFormat.YOLOV5_HEAD),
        (table(300, 84), {"labels": names(80)}, OutputFormat.RTDETR),
        (table(300, 7), {"metadata": "{'task': 'detect', 'names': ['a', 'b', 'c']}"}, OutputFormat.RTDETR),
        (table(84, 2100), {"head": "yolo"}, OutputFormat.YOLO_HEAD),
        (table(-1, -1), {"head": "yolov5"}, OutputFormat.YOLOV5_HEAD),
        (table(-1, 85), {"head": "yolox"}, OutputFormat.YOLOX_HEAD),
        (table(8400, 6), {"head": "end_to_end"}, OutputFormat.SIX_COLUMNS),
        (table(8400, 6), {"head": "deepstream"}, OutputFormat.DEEPSTREAM),
        (table(8400, 84), {"labels": names(80)}, OutputFormat.YOLO_HEAD),
        (table(2000, 84), {"head": "yolo"}, OutputFormat.YOLO_HEAD),
    ],
)
def test_head_is_recognised_by_its_shape_or_named_by_the_config(
    output: Tensor, parameters: dict[str, Any], output_format: OutputFormat
) -> None:
    head = spec_of(output, **parameters).expect_head(DetectionHead)

    assert head.output_format is output_format
    assert head.has_normalized_boxes == (output_format is OutputFormat.RTDETR)
    assert head.finds_once == (output_format in {OutputFormat.RTDETR, OutputFormat.SIX_COLUMNS})


@pytest.mark.parametrize(
    ("outputs", "parameters"),
    [
        *(([table(*dims)], {}) for dims in ((300, 7), (4, 8400), (25200, 5), (-1, 85))),
        ([table(300, 6, data_type="TYPE_STRING")], {}),
        (END_TO_END[:3], {}),
        ([*END_TO_END[:3], table(100, name="other")], {}),
        ([*END_TO_END, table(1, name="decoded", data_type="TYPE_INT32")], {}),  # only a model that takes files can tell that
        *(([table(rows, 84)], {"labels": names(labels)}) for rows, labels in ((300, 79), (-1, 80))),
        ([table(300, 7)], {"labels": names(3)}),  # rows of seven are also those of rotated boxes
        ([table(4, 8400)], {"head": "yolo"}),
        ([YOLO], {"head": "rtdetr"}),
        (END_TO_END, {"head": "rtdetr"}),
    ],
)
def test_outputs_of_no_head_are_described(outputs: list[Tensor], parameters: dict[str, Any]) -> None:
    described = ", ".join(f"{name} {data_type[5:]} {dims}" for name, data_type, dims in outputs)
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(*outputs, **parameters)

    assert caught.value.detail.endswith(f"match no supported head: inputs images FP32 [3, 640, 640]; outputs {described}")


@pytest.mark.parametrize(
    ("outputs", "parameters", "expected"),
    [
        ([PROTOTYPES, table(39, 8400)], {}, ("segmentation", 32, OutputFormat.YOLO_HEAD)),
        ([table(300, 38), PROTOTYPES], {"metadata": SEGMENT}, ("segmentation", 32, OutputFormat.SIX_COLUMNS)),
        ([table(300, 12)], {"metadata": POSE}, ("pose", 6, OutputFormat.SIX_COLUMNS)),
        ([table(8, 8400)], {"metadata": "{'task': 'obb'}"}, ("obb", 1, OutputFormat.YOLO_HEAD)),
        ([table(300, 7)], {"task": "obb"}, ("obb", 1, OutputFormat.SIX_COLUMNS)),
        ([*END_TO_END, table(100, name="det_angles")], {}, ("obb", 1, OutputFormat.END_TO_END)),
        ([*END_TO_END, table(100, 5, 2, name="det_keypoints")], {}, ("pose", 10, OutputFormat.END_TO_END)),
    ],
)
def test_head_with_features_is_recognised(outputs: list[Tensor], parameters: dict[str, Any], expected: tuple[object, ...]) -> None:
    """The prototypes are read last, in whatever order the config has them."""
    spec = spec_of(*outputs, **parameters)
    head = spec.head

    assert isinstance(head, DetectionHead)
    assert (head.task, head.features, head.output_format) == expected
    assert PROTOTYPES not in outputs or spec.output_names[-1] == "masks"


def test_each_class_has_one_label() -> None:
    rows: list[tuple[Tensor, dict[str, Any], int]] = [(YOLO, {}, 80), (RTDETR, {"head": "rtdetr"}, 80), (SCORES, {}, 1000)]
    for output, parameters, classes in rows:
        for labels in (classes - 1, classes + 1):
            with pytest.raises(UnsupportedModel, match=rf"^m has {labels} labels for {classes} classes; its config needs one"):
                spec_of(output, labels=names(labels), **parameters)
        assert len(spec_of(output, labels=names(classes), **parameters).labels) == classes
    for unknown in (table(-1, 6), table(-1)):
        assert spec_of(unknown, labels="a,b,c").labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("rest", "order"),
    [
        ((table(50, data_type="TYPE_FP16", name="a"), table(50, data_type="TYPE_INT64", name="b")), ("n", "boxes", "a", "b")),
        ((table(-1, name="conf"), table(-1, name="Class_Ids")), ("n", "boxes", "conf", "Class_Ids")),
        ((table(9, name="class_scores"), table(9, data_type="TYPE_UINT8", name="ids")), ("n", "boxes", "class_scores", "ids")),
    ],
)
def test_four_tensors_are_identified(rest: tuple[Tensor, ...], order: tuple[str, ...]) -> None:
    """Shapes and types decide, whatever the order and names; the names decide only where classes are floats."""
    assert spec_of(*rest, table(-1, 4, name="boxes"), table(1, name="n", data_type="TYPE_UINT32")).output_names == order


def test_score_for_each_class_is_a_classifier() -> None:
    spec = spec_of(table(1, 21841), image=table(1, 224, 224, 3), batch=0)

    assert spec.head == ClassificationHead(classes=21841, scores="logits")
    assert (spec.resize, spec.crop, spec.channels, spec.scale, spec.input_size) == ("center_crop", 0.875, "RGB", 255.0, (224, 224))
    metadata = "{'task': 'classify', 'imgsz': [320, 320], 'names': {0: 'tench', 1: 'goldfish'}}"
    spec = spec_of(table(2), image=VARIABLE, metadata=metadata)
    assert spec.head == ClassificationHead(classes=2, scores="probabilities")
    assert (spec.crop, spec.input_size, spec.labels) == (1.0, (320, 320), ("tench", "goldfish"))
    with pytest.raises(UnsupportedModel, match=r"^m is a model for the task .*; supported are detection, classification, "):
        spec_of(YOLO, metadata="{'task': ['detect']}")
    with pytest.raises(UnsupportedModel, match=r"m is a pose model; its config must have .* `kpt_shape`"):
        spec_of(table(-1, 8400), metadata="{'task': 'pose', 'kpt_shape': [1000000000, 3]}")
