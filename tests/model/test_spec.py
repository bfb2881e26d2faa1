"""What the gateway derives from a model's Triton config, and the configs that it refuses."""

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
from tests.model.configs import (
    END_TO_END,
    FILE,
    IMAGES,
    RTDETR,
    SCORES,
    VARIABLE,
    YOLO,
    YOLOX,
    Tensor,
    config,
    spec_of,
    table,
)
from tests.support import ROOT


@pytest.mark.parametrize(
    ("batch", "groups", "images", "device"),
    [
        (0, [], 1, "cpu"),
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


@pytest.mark.parametrize("invalid", [{"scale": "nan"}, {"resize": "fit"}, {"mean": "0,nan,0"}, {"std": "1,1,0"}])
def test_invalid_parameter_is_named(invalid: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=rf"the config of m has an invalid parameter: .*{next(iter(invalid))}"):
        spec_of(**invalid)


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


@pytest.mark.parametrize(
    ("parameters", "input_size"),
    [
        ({}, (640, 640)),
        ({"metadata": "{'imgsz': (384, 640)}"}, (640, 384)),
        ({"metadata": "{'imgsz': 416}"}, (416, 416)),
        ({"metadata": "{'imgsz': [320, 0]}"}, (640, 640)),
        ({"square": "512", "metadata": "{'imgsz': [384, 640]}"}, (512, 512)),
    ],
)
def test_variable_input_size_is_read_from_the_parameters(parameters: dict[str, Any], input_size: tuple[int, int]) -> None:
    """`square` takes precedence over the exporter's `imgsz`; the default is 640. A fixed size takes precedence over both."""
    assert spec_of(image=VARIABLE, **parameters).input_size == input_size
    assert spec_of(image=table(3, 96, -1), **parameters).input_size == (input_size[0], 96)


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


@pytest.mark.parametrize(
    "images", [[table(640, 3, 640)], [table(1, 3, 640, 640)], [table(3, 9, 9, data_type="TYPE_INT32")], [], 2 * [IMAGES]]
)
def test_inputs_of_no_head_are_described(images: list[Tensor]) -> None:
    inputs = [{"name": name, "data_type": data_type, "dims": dims} for name, data_type, dims in images]
    with pytest.raises(UnsupportedModel, match=r"match no supported head: inputs (o|images|none)"):
        from_triton_config(config() | {"input": inputs}, "1")


@pytest.mark.parametrize(
    ("output", "parameters", "expected"),
    [
        (YOLO, {}, ("letterbox", "RGB", 255.0, "center")),
        (YOLOX, {}, ("letterbox", "BGR", 1.0, "top_left")),
        (RTDETR, {"head": "rtdetr"}, ("stretch", "RGB", 255.0, "center")),
    ],
)
def test_preprocessing_is_that_of_the_published_models(
    output: Tensor, parameters: dict[str, Any], expected: tuple[object, ...]
) -> None:
    spec = spec_of(output, **parameters)

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


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [
        ({"labels": " cat , traffic light "}, ("cat", "traffic light")),
        ({"labels": '["tights, or a jersey", " dog\\u0021"]'}, ("tights, or a jersey", "dog!")),
        ({"labels": "cat [tabby],dog"}, ("cat [tabby]", "dog")),
        ({"labels": "[]", "metadata": "{'names': {0: 'dog'}}"}, ("dog",)),
        ({"metadata": "{'names': {1: 'dog', 0: 'cat'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 7}}"}, ("7",)),
        ({"labels": "cat", "metadata": "{'names': {0: 'dog'}}"}, ("cat",)),
        ({}, ()),
    ],
)
def test_class_names_are_found(parameters: dict[str, str], labels: tuple[str, ...]) -> None:
    """`labels` takes precedence over the exporter's metadata; without either there are no names."""
    assert hints(**parameters).class_names() == labels


@pytest.mark.parametrize(
    "metadata",
    [
        "\0",
        "[1, 2]",
        "{'names': {0: 'cat', 2: 'dog'}}",
        "{'names': 3, 'imgsz': {}}",
        "__import__('os').getcwd()",
        "1+" * 5000 + "1",
        "-" * 100_000 + "1",
    ],
)
def test_malformed_metadata_leaves_the_defaults(metadata: str) -> None:
    assert (hints(metadata=metadata).class_names(), hints(metadata=metadata).input_size()) == ((), None)


@pytest.mark.parametrize("labels", ["[cat,dog]", '["cat", 7]', "[" * 5000])
def test_labels_that_are_no_json_array_are_rejected(labels: str) -> None:
    """Split at commas, they would be wrong names."""
    with pytest.raises(msgspec.ValidationError, match="labels begin with"):
        hints(labels=labels)


def test_every_parameter_is_documented() -> None:
    page = (ROOT / "docs" / "how-to" / "model-config.md").read_text(encoding="utf-8")
    table = page.partition("| parameter | values | default |\n")[2].partition("\n\n")[0]
    listed = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]

    assert sorted(listed) == sorted(ModelParameters.__struct_encode_fields__)
