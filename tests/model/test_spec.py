"""What the gateway derives from a model's Triton config, and the configs that it refuses."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnsupportedModel, WrongTask
from app.model.heads import ClassificationHead, DetectionHead, OutputFormat
from app.model.spec import InputFormat, ModelSpec, are_interchangeable, from_triton_config
from tests.fakes.triton import SPEC
from tests.model.test_triton_config import MALFORMED

Tensor = tuple[str, str, list[int | str]]

IMAGES: Tensor = ("images", "TYPE_FP32", [3, 640, 640])
END_TO_END: tuple[Tensor, ...] = (
    ("num_dets", "TYPE_INT32", [1]),
    ("det_boxes", "TYPE_FP32", [100, 4]),
    ("det_scores", "TYPE_FP32", [100]),
    ("det_classes", "TYPE_INT32", [100]),
)
SIX_COLUMNS: Tensor = ("output0", "TYPE_FP32", [300, 6])
YOLO_HEAD: Tensor = ("output0", "TYPE_FP32", [84, 8400])
YOLOV5_HEAD: Tensor = ("output", "TYPE_FP32", [25200, 85])
YOLOX_HEAD: Tensor = ("output", "TYPE_FP32", [8400, 85])


def tensors(*given: Tensor) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": data_type, "dims": dims} for name, data_type, dims in given]


def config(*outputs: Tensor, image: Tensor = IMAGES, batch: int = 1, **parameters: str) -> dict[str, Any]:
    return {
        "name": "m",
        "backend": "onnxruntime",
        "max_batch_size": batch,
        "input": tensors(image),
        "output": tensors(*outputs),
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def names(count: int) -> str:
    """Return `labels` for so many classes."""
    return ",".join(map(str, range(count)))


def table(*dims: int) -> Tensor:
    return ("o", "TYPE_FP32", list(dims))


def spec_of(*outputs: Tensor, image: Tensor = IMAGES, batch: int = 1, **parameters: str) -> ModelSpec:
    return from_triton_config(config(*(outputs or (SIX_COLUMNS,)), image=image, batch=batch, **parameters), "1")


def format_of(spec: ModelSpec) -> OutputFormat:
    return spec.expect_head(DetectionHead).output_format


def with_groups(*groups: dict[str, Any], batch: int = 1) -> ModelSpec:
    return from_triton_config(config(SIX_COLUMNS, batch=batch) | {"instance_group": groups}, "1")


def test_spec_of_a_plain_model() -> None:
    assert spec_of(SIX_COLUMNS) == ModelSpec(
        name="m",
        version="1",
        backend="onnxruntime",
        device="cpu",
        max_batch=1,
        instances=1,
        input_name="images",
        dtype=np.float32,
        input_format=InputFormat.CHW,
        has_batch_dimension=True,
        input_size=(640, 640),
        output_names=("output0",),
        output_dtypes=(np.dtype("float32"),),
        head=DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=False, iou=0.7, max_iou=1.0),
        tells_decoded=False,
        resize="letterbox",
        placement="center",
        enlarge=True,
        pad=114,
        crop=0.875,
        interpolation="bilinear",
        channels="RGB",
        scale=255.0,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        labels=(),
        source="",
        licence="",
    )


@pytest.mark.parametrize(
    ("batch", "groups", "expected"),
    [
        (0, [], 1),
        (8, [], 8),
        (0, [{"count": 3}], 3),
        (8, [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}], 32),
        (8, [{"count": 2, "kind": "KIND_GPU"}, {"kind": "KIND_CPU"}], 24),
        (4, [{"count": 0}], 4),
    ],
)
def test_a_model_processes_a_full_batch_in_each_instance(batch: int, groups: list[dict[str, Any]], expected: int) -> None:
    assert with_groups(*groups, batch=batch).parallel_images == expected


def test_every_parameter_is_read() -> None:
    given = spec_of(
        SIX_COLUMNS,
        image=("images", "TYPE_FP32", [3, -1, -1]),
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

    assert given.labels == ("person", "traffic light")
    assert (given.resize, given.crop, given.placement, given.enlarge, given.pad) == ("center_crop", 0.5, "top_left", False, 0)
    assert (given.channels, given.scale, given.input_size) == ("BGR", 1.5, (416, 416))
    assert given.head == DetectionHead(output_format=OutputFormat.SIX_COLUMNS, has_normalized_boxes=True, iou=0.45, max_iou=0.45)
    assert (given.source, given.licence, given.default_version) == ("https://example.org/m", "MIT", 3)


@pytest.mark.parametrize(
    ("outputs", "iou", "expected"),
    [
        (END_TO_END, None, (0.7, 0.7)),
        (END_TO_END, "0.45", (0.45, 0.45)),
        ((SIX_COLUMNS,), None, (0.7, 1.0)),
        ((SIX_COLUMNS,), "0.45", (0.45, 0.45)),
        ((SIX_COLUMNS,), "0", (0.0, 0.0)),
        *(((head,), None, (0.7, 1.0)) for head in (YOLO_HEAD, YOLOV5_HEAD)),
        *(((head,), "0.45", (0.45, 1.0)) for head in (YOLO_HEAD, YOLOV5_HEAD)),
    ],
)
def test_the_overlap_of_boxes_and_its_maximum(outputs: tuple[Tensor, ...], iou: str | None, expected: tuple[float, float]) -> None:
    """A model that suppresses boxes itself sets the maximum: one with four tensors always, with rows of six if its config tells."""
    spec = spec_of(*outputs, iou=iou) if iou else spec_of(*outputs)

    assert isinstance(spec.head, DetectionHead)
    assert (spec.head.iou, spec.head.max_iou) == expected


def test_parameters_of_others_are_ignored() -> None:
    assert spec_of(SIX_COLUMNS, execution_mode="1", optimization="x") == spec_of(SIX_COLUMNS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("placement", "centre"),
        ("enlarge", "yes"),
        ("pad", "-1"),
        ("channels", "rgb"),
        ("scale", "0"),
        ("scale", "nan"),
        ("square", "31"),
        ("box_units", "percent"),
        ("iou", "1.1"),
        ("resize", "fit"),
        ("crop", "0"),
        ("interpolation", "nearest"),
        ("scores", "percent"),
        ("mean", "0.5"),
        ("mean", "0,0,0,0"),
        ("mean", "0,nan,0"),
        ("std", "1,1,0"),
        ("std", "1;1;1"),
        ("head", "yolov8"),
        ("default_version", "0"),
    ],
)
def test_invalid_parameter_is_named(name: str, value: str) -> None:
    parameter: dict[str, Any] = {name: value}

    with pytest.raises(UnsupportedModel, match=rf"the config of m has an invalid parameter: .*{name}"):
        spec_of(SIX_COLUMNS, **parameter)


@pytest.mark.parametrize("config", [{}, {"name": 1}, {"name": "m", "input": 5}, {"name": "m", "input": [{"name": "a"}]}])
def test_malformed_config_is_unsupported(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        from_triton_config(config, "1")


@pytest.mark.parametrize(
    ("kinds", "device"), [([], "cpu"), (["KIND_CPU"], "cpu"), (["KIND_AUTO"], "cpu"), (["KIND_CPU", "KIND_GPU"], "gpu")]
)
def test_device_is_that_of_the_instances(kinds: list[str], device: str) -> None:
    """An ensemble has none, so a parameter says where it runs."""
    assert spec_of(device=device).device == device
    assert with_groups(*({"kind": kind} for kind in kinds)).device == device


def test_version_is_the_given_one() -> None:
    given = from_triton_config(config(SIX_COLUMNS) | {"backend": "", "platform": "tensorrt_plan"}, "7")

    assert given == msgspec.structs.replace(from_triton_config(config(SIX_COLUMNS), "7"), backend="tensorrt_plan")
    assert given.version == "7"


@pytest.mark.parametrize(
    ("dims", "input_format", "input_size"),
    [
        ([3, 480, 640], InputFormat.CHW, (640, 480)),
        (["3", "480", "640"], InputFormat.CHW, (640, 480)),
        ([480, 640, 3], InputFormat.HWC, (640, 480)),
        ([3, -1, -1], InputFormat.CHW, (640, 640)),
        ([-1, -1, 3], InputFormat.HWC, (640, 640)),
        ([3, -1, 320], InputFormat.CHW, (320, 640)),
    ],
)
def test_channels_are_found_first_or_last(dims: list[int | str], input_format: InputFormat, input_size: tuple[int, int]) -> None:
    """Triton's JSON has numbers as texts."""
    given = spec_of(image=("images", "TYPE_FP32", dims))

    assert (given.input_format, given.input_size, given.has_batch_dimension) == (input_format, input_size, True)


@pytest.mark.parametrize(
    ("parameters", "input_size"),
    [
        ({}, (640, 640)),
        ({"metadata": "{'imgsz': [320, 320]}"}, (320, 320)),
        ({"metadata": "{'imgsz': (384, 640)}"}, (640, 384)),
        ({"metadata": "{'imgsz': [320]}"}, (320, 320)),
        ({"metadata": "{'imgsz': 416}"}, (416, 416)),
        ({"metadata": "{'imgsz': []}"}, (640, 640)),
        ({"metadata": "{'imgsz': '320'}"}, (640, 640)),
        ({"metadata": "{'imgsz': -1}"}, (640, 640)),
        ({"metadata": "{'imgsz': [320, 0]}"}, (640, 640)),
        ({"square": "512"}, (512, 512)),
        ({"square": "512", "metadata": "{'imgsz': [384, 640]}"}, (512, 512)),
    ],
)
def test_variable_input_size_is_read_from_the_parameters(parameters: dict[str, Any], input_size: tuple[int, int]) -> None:
    """`square` takes precedence over the exporter's `imgsz`; the default is 640. A fixed size takes precedence over both."""
    assert spec_of(image=("images", "TYPE_FP32", [3, -1, -1]), **parameters).input_size == input_size
    assert spec_of(image=("images", "TYPE_FP32", [3, 96, -1]), **parameters).input_size == (input_size[0], 96)
    assert spec_of(image=("images", "TYPE_FP32", [3, 96, 96]), **parameters).input_size == (96, 96)


@pytest.mark.parametrize(
    ("batch", "image", "output", "expected"),
    [
        (8, [3, 640, 640], [300, 6], True),
        (0, [1, 3, 640, 640], [1, 300, 6], True),
        (0, [-1, 3, 640, 640], [-1, 300, 6], True),
        (0, [3, 640, 640], [300, 6], False),
    ],
)
def test_batch_dimension_is_found(batch: int, image: list[int | str], output: list[int | str], *, expected: bool) -> None:
    given = spec_of(("o", "TYPE_FP32", output), image=("i", "TYPE_FP32", image), batch=batch)

    assert (given.has_batch_dimension, given.input_size) == (expected, (640, 640))
    assert format_of(given) is OutputFormat.SIX_COLUMNS


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("dims", [[1], [-1]])
def test_model_that_takes_the_file(dims: list[int | str], batch: int) -> None:
    given = spec_of(*END_TO_END, image=("file", "TYPE_STRING", dims), batch=batch, square="640")

    assert (given.input_format, given.dtype, given.datatype) == (InputFormat.FILE, None, "BYTES")
    assert (given.input_size, given.has_batch_dimension) == ((640, 640), batch > 0)
    assert (given.image_shape, given.image_bytes) == ((1,), 2**20)
    assert given.batch_shape(1) == ((1, 1) if batch else (1,))


def test_model_that_takes_the_file_must_have_its_size_in_the_config() -> None:
    """Without it, the unit of its boxes is unknown."""
    file: Tensor = ("file", "TYPE_STRING", [1])
    assert spec_of(*END_TO_END, image=file, metadata="{'imgsz': [384, 640]}").input_size == (640, 384)
    with pytest.raises(UnsupportedModel, match="m takes the encoded file; its config must say `square`"):
        spec_of(*END_TO_END, image=("file", "TYPE_STRING", [1]))


@pytest.mark.parametrize("outputs", [END_TO_END, (SIX_COLUMNS,), (YOLO_HEAD,)])
def test_model_may_tell_which_files_it_could_not_decode(outputs: tuple[Tensor, ...]) -> None:
    file: Tensor = ("file", "TYPE_STRING", [1])
    without = spec_of(*outputs, image=file, square="640")
    given = spec_of(("decoded", "TYPE_INT32", [1]), *outputs, image=file, square="640")

    assert not without.tells_decoded
    assert given == msgspec.structs.replace(without, tells_decoded=True)
    assert given.requested_names == (*without.output_names, "decoded")


@pytest.mark.parametrize(
    ("output", "output_format"),
    [
        (SIX_COLUMNS, OutputFormat.SIX_COLUMNS),
        (("o", "TYPE_FP32", [-1, 6]), OutputFormat.SIX_COLUMNS),
        (("o", "TYPE_FP16", [100, 6]), OutputFormat.SIX_COLUMNS),
        (YOLO_HEAD, OutputFormat.YOLO_HEAD),
        (("o", "TYPE_FP32", [5, 8400]), OutputFormat.YOLO_HEAD),
        (("o", "TYPE_FP32", [6, 8400]), OutputFormat.YOLO_HEAD),
        (("o", "TYPE_FP32", [84, -1]), OutputFormat.YOLO_HEAD),
        *((table(84, anchors), OutputFormat.YOLO_HEAD) for anchors in (8500, 34000)),
        (YOLOX_HEAD, OutputFormat.YOLOX_HEAD),
        (("o", "TYPE_FP32", [8400, 6]), OutputFormat.YOLOX_HEAD),
        (YOLOV5_HEAD, OutputFormat.YOLOV5_HEAD),
        *((table(3 * anchors, 6), OutputFormat.YOLOV5_HEAD) for anchors in (8400, 8500, 34000)),
    ],
)
def test_single_output_is_recognised_by_its_shape(output: Tensor, output_format: OutputFormat) -> None:
    given = spec_of(output)

    assert (format_of(given), given.output_names) == (output_format, (output[0],))


@pytest.mark.parametrize("output", [YOLO_HEAD, YOLOV5_HEAD, YOLOX_HEAD])
def test_anchors_are_those_of_the_input(output: Tensor) -> None:
    image: Tensor = ("images", "TYPE_FP32", [3, 384, 640])

    assert format_of(spec_of(table(84, 5040), image=image)) is OutputFormat.YOLO_HEAD
    with pytest.raises(UnsupportedModel, match="match no supported head"):
        spec_of(output, image=image)


@pytest.mark.parametrize(
    ("head", "output_format", "fitting", "others"),
    [
        ("yolo", OutputFormat.YOLO_HEAD, ([84, 8400], [84, 2100], [-1, -1]), ([8400, 84], [4, 8400])),
        ("yolov5", OutputFormat.YOLOV5_HEAD, ([25200, 6], [8400, 85], [6000, 85], [-1, -1]), ([8400, 5], [84, 8400])),
        ("yolox", OutputFormat.YOLOX_HEAD, ([8400, 85], [8400, 6], [-1, 85]), ([25200, 85], [8400, 5], [84, 8400])),
        ("end_to_end", OutputFormat.SIX_COLUMNS, ([300, 6], [8400, 6], [-1, -1]), ([300, 7], [84, 8400])),
        ("rtdetr", OutputFormat.RTDETR, ([300, 84], [300, 6], [300, 5], [300, 369], [-1, -1]), ([300, 4], [84, 8400])),
    ],
)
def test_the_config_may_specify_the_head(
    head: str, output_format: OutputFormat, fitting: tuple[list[int], ...], others: tuple[list[int], ...]
) -> None:
    for dims in fitting:
        assert format_of(spec_of(table(*dims), head=head)) is output_format
    for dims in others:
        with pytest.raises(UnsupportedModel, match=rf"match no supported head: .*outputs o FP32 \[{dims[0]}, {dims[1]}\]$"):
            spec_of(table(*dims), head=head)


@pytest.mark.parametrize("head", ["yolo", "yolov5", "yolox", "end_to_end", "rtdetr"])
def test_a_head_is_that_of_a_detector(head: str) -> None:
    for outputs in ((SCORES,), END_TO_END[:3]) if head == "end_to_end" else ((SCORES,), END_TO_END):
        with pytest.raises(UnsupportedModel, match="match no supported head"):
            spec_of(*outputs, head=head)
    assert spec_of(*END_TO_END, head="end_to_end") == spec_of(*END_TO_END)


def test_rows_of_rtdetr_are_recognised_by_the_labels() -> None:
    for classes in (1, 80, 365):
        assert format_of(spec_of(table(300, 4 + classes), labels=names(classes))) is OutputFormat.RTDETR
    detector = "{'task': 'detect', 'names': {0: 'a', 1: 'b', 2: 'c'}}"
    assert format_of(spec_of(table(300, 7), metadata=detector)) is OutputFormat.RTDETR


@pytest.mark.parametrize(
    ("dims", "labels"), [((300, 84), 0), ((300, 84), 79), ((300, 369), 0), ((301, 84), 80), ((-1, 84), 80), ((300, 7), 3)]
)
def test_rows_that_may_be_others_are_unsupported(dims: tuple[int, int], labels: int) -> None:
    """Rows of seven are also those of rotated boxes."""
    with pytest.raises(UnsupportedModel, match="match no supported head"):
        spec_of(table(*dims), labels=names(labels))


def test_two_labels_do_not_change_rows_of_six() -> None:
    assert format_of(spec_of(SIX_COLUMNS, labels="cat,dog")) is OutputFormat.SIX_COLUMNS
    assert format_of(spec_of(SIX_COLUMNS, labels="cat,dog", head="rtdetr")) is OutputFormat.RTDETR


@pytest.mark.parametrize("units", ["pixels", "normalized"])
def test_boxes_of_rtdetr_are_fractions(units: str) -> None:
    """Whatever the unit in the config."""
    head = spec_of(table(300, 84), head="rtdetr", box_units=units).head

    assert head == DetectionHead(output_format=OutputFormat.RTDETR, has_normalized_boxes=True, iou=0.7, max_iou=1.0)
    assert head.finds_once


@pytest.mark.parametrize(
    ("output", "parameters", "expected"),
    [
        (YOLO_HEAD, {}, ("letterbox", "RGB", 255.0, "center")),
        (YOLOV5_HEAD, {}, ("letterbox", "RGB", 255.0, "center")),
        (YOLOX_HEAD, {}, ("letterbox", "BGR", 1.0, "top_left")),
        (YOLOX_HEAD, {"channels": "RGB", "scale": "255", "placement": "center"}, ("letterbox", "RGB", 255.0, "center")),
        (YOLOX_HEAD, {"head": "yolov5"}, ("letterbox", "RGB", 255.0, "center")),
        (table(300, 84), {"head": "rtdetr"}, ("stretch", "RGB", 255.0, "center")),
        (table(300, 84), {"head": "rtdetr", "resize": "letterbox"}, ("letterbox", "RGB", 255.0, "center")),
    ],
)
def test_preprocessing_is_that_of_the_published_models(
    output: Tensor, parameters: dict[str, Any], expected: tuple[object, ...]
) -> None:
    spec = spec_of(output, **parameters)

    assert (spec.resize, spec.channels, spec.scale, spec.placement) == expected


SEGMENT, POSE, OBB = (f"{{'task': '{task}', 'kpt_shape': [2, 3]}}" for task in ("segment", "pose", "obb"))
PROTOTYPES: Tensor = ("masks", "TYPE_FP32", [32, 160, 160])
COMPOSED: list[Tensor] = [
    ("num_dets", "TYPE_INT32", [1]),
    ("det_boxes", "TYPE_FP32", [300, 4]),
    ("det_scores", "TYPE_FP32", [300]),
    ("det_classes", "TYPE_INT32", [300]),
]


@pytest.mark.parametrize(
    ("outputs", "parameters", "task", "features", "output_format"),
    [
        ([PROTOTYPES, table(39, 8400)], {}, "segmentation", 32, OutputFormat.YOLO_HEAD),
        ([table(300, 38), PROTOTYPES], {"metadata": SEGMENT}, "segmentation", 32, OutputFormat.SIX_COLUMNS),
        ([table(13, 8400)], {"metadata": POSE}, "pose", 6, OutputFormat.YOLO_HEAD),
        ([table(300, 12)], {"metadata": POSE}, "pose", 6, OutputFormat.SIX_COLUMNS),
        ([table(8, 8400)], {"metadata": OBB}, "obb", 1, OutputFormat.YOLO_HEAD),
        ([table(300, 7)], {"task": "obb"}, "obb", 1, OutputFormat.SIX_COLUMNS),
        ([*COMPOSED, ("det_angles", "TYPE_FP32", [300])], {}, "obb", 1, OutputFormat.END_TO_END),
        ([*COMPOSED, ("det_keypoints", "TYPE_FP32", [300, 5, 2])], {}, "pose", 10, OutputFormat.END_TO_END),
    ],
)
def test_a_head_with_features_is_recognised(
    outputs: list[Tensor], parameters: dict[str, Any], task: str, features: int, output_format: OutputFormat
) -> None:
    """The prototypes are read last, in whatever order the config has them."""
    spec = spec_of(*outputs, **parameters)

    assert isinstance(spec.head, DetectionHead)
    assert (spec.head.task, spec.head.features, spec.head.output_format) == (task, features, output_format)
    assert PROTOTYPES not in outputs or spec.output_names[-1] == "masks"


@pytest.mark.parametrize("task", ["semantic", ["detect"]])
@pytest.mark.parametrize("output", [YOLO_HEAD, SIX_COLUMNS, ("scores", "TYPE_FP32", [1000])])
def test_a_model_of_another_task_is_unsupported(output: Tensor, task: object) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(output, metadata=f"{{'task': {task!r}}}")
    assert caught.value.detail.startswith(f"m is a model for the task {task!r}; supported are detection, classification, ")


@pytest.mark.parametrize("output", [table(-1, 8400), table(300, -1)])
@pytest.mark.parametrize("shape", [None, [0, 3], [10**9, 3], [17, 4]])
def test_a_pose_model_has_a_sensible_number_of_keypoints(output: Tensor, shape: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"m is a pose model; its config must have .* `kpt_shape`"):
        spec_of(output, metadata=repr({"task": "pose", "kpt_shape": shape}))


@pytest.mark.parametrize(
    ("output", "parameters", "classes"),
    [
        (YOLO_HEAD, {}, 80),
        (table(56, 8400), {}, 52),  # that of a model for poses
        (YOLOV5_HEAD, {}, 80),
        (table(8400, 84), {}, 79),
        (table(300, 84), {"head": "rtdetr"}, 80),
        (("scores", "TYPE_FP32", [1000]), {}, 1000),
    ],
)
def test_each_class_has_one_label(output: Tensor, parameters: dict[str, Any], classes: int) -> None:
    for labels in (classes - 1, classes + 1):
        with pytest.raises(UnsupportedModel, match=rf"^m has {labels} labels for {classes} classes; its config needs one"):
            spec_of(output, labels=names(labels), **parameters)
    for labels, text in ((0, ""), (classes, names(classes)), (classes, ",".join(["same"] * classes))):
        assert len(spec_of(output, labels=text, **parameters).labels) == labels


@pytest.mark.parametrize(
    ("output", "parameters"),
    [
        (SIX_COLUMNS, {}),
        (table(-1, 8400), {"head": "yolo"}),
        (table(-1, -1), {"head": "yolov5"}),
        (table(-1, -1), {"head": "rtdetr"}),
        (("scores", "TYPE_FP32", [-1]), {}),
    ],
)
def test_any_labels_fit_an_unknown_number_of_classes(output: Tensor, parameters: dict[str, Any]) -> None:
    assert spec_of(output, labels="a,b,c", **parameters).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("tensors", "order"),
    [
        (END_TO_END, ("num_dets", "det_boxes", "det_scores", "det_classes")),
        (END_TO_END[::-1], ("num_dets", "det_boxes", "det_scores", "det_classes")),
        (
            (("a", "TYPE_FP16", [50]), ("b", "TYPE_INT64", [50]), ("c", "TYPE_FP16", [50, 4]), ("d", "TYPE_INT64", [1])),
            ("d", "c", "a", "b"),
        ),
        (
            (("n", "TYPE_UINT32", [1]), ("b", "TYPE_FP32", [-1, 4]), ("conf", "TYPE_FP32", [-1]), ("Class_Ids", "TYPE_FP32", [-1])),
            ("n", "b", "conf", "Class_Ids"),
        ),
        (
            (("n", "TYPE_INT32", [1]), ("b", "TYPE_FP32", [9, 4]), ("labels", "TYPE_FP32", [9]), ("conf", "TYPE_FP32", [9])),
            ("n", "b", "conf", "labels"),
        ),
        (
            (("n", "TYPE_INT32", [1]), ("b", "TYPE_FP32", [9, 4]), ("class_scores", "TYPE_FP32", [9]), ("ids", "TYPE_UINT8", [9])),
            ("n", "b", "class_scores", "ids"),
        ),
    ],
)
def test_four_tensors_are_identified(tensors: tuple[Tensor, ...], order: tuple[str, ...]) -> None:
    """Shapes and types decide, whatever the order and names; the names decide only where classes are floats."""
    given = spec_of(*tensors)

    assert (format_of(given), given.output_names) == (OutputFormat.END_TO_END, order)


@pytest.mark.parametrize(
    ("images", "outputs"),
    [
        *(
            ((IMAGES,), outputs)
            for outputs in (
                (),
                (("o", "TYPE_FP32", [1]),),
                (("o", "TYPE_INT64", [1000]),),
                (("o", "TYPE_FP32", [1000, 1, 1]),),
                (("o", "TYPE_FP32", [300, 7]),),
                (("o", "TYPE_FP32", [4, 8400]),),
                (("o", "TYPE_FP32", [8400, 5]),),
                (("o", "TYPE_FP32", [8500, 6]),),
                (("o", "TYPE_FP32", [25200, 5]),),
                (("o", "TYPE_FP32", [20, 21504]),),
                (("o", "TYPE_FP32", [-1, 85]),),
                (("o", "TYPE_FP32", [1, 300, 6]),),
                (SIX_COLUMNS, ("other", "TYPE_FP32", [84, 8400])),
                (("o", "TYPE_STRING", [300, 6]),),
                END_TO_END[:3],
                (*END_TO_END[:3], ("det_classes", "TYPE_FP32", [100, 1])),
                (*END_TO_END[:3], ("other", "TYPE_FP32", [100])),
                (*END_TO_END[:3], ("det_classes", "TYPE_STRING", [100])),
                (("n", "TYPE_FP32", [1]), *END_TO_END[1:]),
                (*END_TO_END, ("decoded", "TYPE_INT32", [1])),  # only a model that takes files can tell that
            )
        ),
        *(
            ((("images", data_type, dims),), (SIX_COLUMNS,))
            for data_type, dims in (
                *(("TYPE_FP32", dims) for dims in ([1, 640, 640], [640, 640], [640, 3, 640], [1, 3, 640, 640])),
                *(("TYPE_INT32", [3, 640, 640]), ("TYPE_STRING", [1, 1]), ("TYPE_STRING", [3, 640, 640])),
            )
        ),
        ((), (SIX_COLUMNS,)),
        ((IMAGES, IMAGES), (SIX_COLUMNS,)),
    ],
)
def test_unknown_tensors_are_described(images: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    inputs, described = (
        ", ".join(f"{name} {data_type[5:]} {dims}" for name, data_type, dims in given) or "none" for given in (images, outputs)
    )

    with pytest.raises(UnsupportedModel) as caught:
        from_triton_config(config(*outputs) | {"input": tensors(*images)}, "1")

    assert caught.value.detail == f"the tensors of m match no supported head: inputs {inputs}; outputs {described}"


@pytest.mark.parametrize("metadata", MALFORMED)
def test_malformed_metadata_leaves_the_defaults(metadata: str) -> None:
    given = spec_of(image=("images", "TYPE_FP32", [3, -1, -1]), metadata=metadata)

    assert (given.labels, given.input_size) == ((), (640, 640))


@given(st.text("{}[]()'\",:0123456789 abnmesigz-+\\", max_size=40))
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_metadata_never_makes_a_model_unusable(metadata: str) -> None:
    assert format_of(spec_of(metadata=metadata)) is OutputFormat.SIX_COLUMNS


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(("data_type", "item_bytes"), [("TYPE_UINT8", 1), ("TYPE_FP32", 4), ("TYPE_FP16", 2)])
@pytest.mark.parametrize(("dims", "shape"), [([3, 4, 6], (3, 4, 6)), ([4, 6, 3], (4, 6, 3))])
def test_shape_and_size_of_the_input_tensor(
    dims: list[int | str], shape: tuple[int, ...], data_type: str, item_bytes: int, batch: int
) -> None:
    spec = spec_of(image=("images", data_type, dims), batch=batch)

    assert (spec.image_shape, spec.datatype) == (shape, data_type.removeprefix("TYPE_"))
    assert spec.image_bytes == math.prod(shape) * item_bytes
    assert spec.batch_shape(1) == ((1, *shape) if batch else shape)


@pytest.mark.parametrize("images", [0, 2, 3])
def test_model_without_a_batch_dimension_takes_one_image(images: int) -> None:
    """The shape of any other number of images does not exist, which would otherwise go unnoticed until Triton is asked."""
    image: Tensor = ("images", "TYPE_UINT8", [4, 6, 3])
    spec = spec_of(image=image, batch=0)

    with pytest.raises(ValueError, match=r"^m has no batch dimension$"):
        spec.batch_shape(images)
    assert spec.batch_shape(1) == (4, 6, 3)
    assert spec_of(image=image, batch=8).batch_shape(images) == (images, 4, 6, 3)


SCORES: Tensor = ("scores", "TYPE_FP32", [1000])


@pytest.mark.parametrize(
    ("output", "batch", "classes"),
    [
        (SCORES, 8, 1000),
        (("s", "TYPE_FP16", [2]), 1, 2),
        (("s", "TYPE_FP32", [-1]), 4, -1),
        (("s", "TYPE_FP32", [1, 21841]), 0, 21841),
        (("s", "TYPE_FP32", [-1, 10]), 0, 10),
    ],
)
def test_score_for_each_class_is_a_classifier(output: Tensor, batch: int, classes: int) -> None:
    side = ("image", "TYPE_UINT8", [*([output[2][0]] if not batch else []), 224, 224, 3])
    given = spec_of(output, image=side, batch=batch)

    assert given.head == ClassificationHead(classes=classes, scores="logits")
    assert (given.head.task, given.output_names, given.input_size) == ("classification", (output[0],), (224, 224))
    assert (given.resize, given.crop, given.interpolation, given.channels, given.scale) == (
        *("center_crop", 0.875, "bilinear"),
        *("RGB", 255.0),
    )


def test_every_parameter_of_a_classifier_is_read() -> None:
    given = spec_of(
        SCORES,
        image=("i", "TYPE_FP32", [3, 224, 224]),
        resize="stretch",
        crop="1",
        interpolation="bicubic",
        scores="probabilities",
        mean="0.485, 0.456, 0.406",
        std="0.229,0.224,0.225",
    )

    assert (given.resize, given.crop, given.interpolation) == ("stretch", 1.0, "bicubic")
    assert given.head == ClassificationHead(classes=1000, scores="probabilities")
    assert (given.mean, given.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    subtrahend, divisor = given.normalization
    assert subtrahend.ravel().tolist() == pytest.approx([123.675, 116.28, 103.53])
    assert divisor.ravel().tolist() == pytest.approx([58.395, 57.12, 57.375])
    assert subtrahend.shape == divisor.shape == (3, 1, 1)


def test_a_classifier_of_ultralytics_needs_no_parameters() -> None:
    metadata = "{'task': 'classify', 'imgsz': [320, 320], 'names': {0: 'tench', 1: 'goldfish'}}"
    given = spec_of(("output0", "TYPE_FP32", [2]), image=("images", "TYPE_FP32", [3, -1, -1]), metadata=metadata)

    assert given.head == ClassificationHead(classes=2, scores="probabilities")
    assert (given.resize, given.crop, given.input_size) == ("center_crop", 1.0, (320, 320))
    assert given.labels == ("tench", "goldfish")


def test_a_model_of_another_task_says_where_it_is_asked() -> None:
    with pytest.raises(WrongTask, match=r"^m is a classifier, not a detector; POST /classify or /predict/m asks it$"):
        spec_of(SCORES).expect_head(DetectionHead)
    with pytest.raises(WrongTask, match=r"^m is a detector, not a classifier; POST /detect or /predict/m asks it$"):
        spec_of(SIX_COLUMNS).expect_head(ClassificationHead)


def test_a_classifier_is_described_by_its_scores() -> None:
    assert spec_of(SCORES).head.description == "logits of 1000 classes"
    assert spec_of(("s", "TYPE_FP32", [-1])).head.description == "logits of the classes"


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        *(
            (change, True)
            for change in ({}, {"version": "2"}, {"device": "gpu"}, {"max_batch": 64, "instances": 4}, {"priority_levels": 2})
        ),
        *((change, True) for change in ({"source": "https://example.org"}, {"licence": "MIT"}, {"default_version": 2})),
        *((change, False) for change in ({"input_size": (64, 64)}, {"output_names": ("other",)}, {"labels": ("cat",)})),
        *((change, False) for change in ({"pad": 0}, {"channels": "BGR"})),
    ],
)
def test_models_of_the_same_inputs_and_outputs_are_interchangeable(change: dict[str, object], *, is_same: bool) -> None:
    assert are_interchangeable(SPEC, msgspec.structs.replace(SPEC, **change)) is is_same
