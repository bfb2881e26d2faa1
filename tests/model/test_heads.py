"""Heads: the task of a model and the format of its outputs, by their shapes and by the parameters of its config."""

from typing import Any

import pytest

from app.errors import UnsupportedModel
from app.model.heads import ClassificationHead, DetectionHead, OutputFormat
from tests.model.configs import (
    END_TO_END,
    PROTOTYPES,
    RTDETR,
    SCORES,
    SIX_COLUMNS,
    VARIABLE,
    YOLO,
    Tensor,
    names,
    spec_of,
    table,
)

SEGMENT, POSE = (f"{{'task': '{task}', 'kpt_shape': [2, 3]}}" for task in ("segment", "pose"))


def test_model_that_suppresses_boxes_sets_the_maximum_of_their_overlap() -> None:
    """One with four tensors always, one with rows of six if its config tells."""
    for outputs, parameters, expected in (
        (END_TO_END, {}, (0.7, 0.7)),
        ((SIX_COLUMNS,), {}, (0.7, 1.0)),
        ((SIX_COLUMNS,), {"iou": "0"}, (0.0, 0.0)),
        ((YOLO,), {"iou": "0.45"}, (0.45, 1.0)),
    ):
        head = spec_of(*outputs, **parameters).expect_head(DetectionHead)
        assert (head.iou, head.max_iou) == expected


@pytest.mark.parametrize(
    ("output", "parameters", "output_format"),
    [
        (table(-1, 6), {}, OutputFormat.SIX_COLUMNS),
        (table(100, 6, data_type="TYPE_FP16"), {"labels": "cat,dog"}, OutputFormat.SIX_COLUMNS),
        (table(5, 8400), {}, OutputFormat.YOLO_HEAD),
        (table(84, -1), {}, OutputFormat.YOLO_HEAD),
        *((table(84, anchors), {}, OutputFormat.YOLO_HEAD) for anchors in (8400, 34000)),
        (table(8400, 6), {}, OutputFormat.YOLOX_HEAD),
        *((table(3 * anchors, 6), {}, OutputFormat.YOLOV5_HEAD) for anchors in (8400, 34000)),
        (table(300, 84), {"labels": names(80)}, OutputFormat.RTDETR),
        (table(300, 7), {"metadata": "{'task': 'detect', 'names': ['a', 'b', 'c']}"}, OutputFormat.RTDETR),
        (table(84, 2100), {"head": "yolo"}, OutputFormat.YOLO_HEAD),
        *((table(*dims), {"head": "yolov5"}, OutputFormat.YOLOV5_HEAD) for dims in ((8400, 85), (-1, -1))),
        (table(-1, 85), {"head": "yolox"}, OutputFormat.YOLOX_HEAD),
        (table(8400, 6), {"head": "end_to_end"}, OutputFormat.SIX_COLUMNS),
        (table(300, 5), {"head": "rtdetr"}, OutputFormat.RTDETR),
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
        *(([table(*dims)], {}) for dims in ((1,), (300, 7), (4, 8400), (25200, 5), (8500, 6), (20, 21504), (-1, 85))),
        ([table(300, 6, data_type="TYPE_STRING")], {}),
        ([SIX_COLUMNS, table(84, 8400, name="other")], {}),
        (END_TO_END[:3], {}),
        ([*END_TO_END[:3], table(100, name="other")], {}),
        ([*END_TO_END, table(1, name="decoded", data_type="TYPE_INT32")], {}),  # only a model that takes files can tell that
        *(([table(rows, 84)], {"labels": names(labels)}) for rows, labels in ((300, 79), (-1, 80))),
        ([table(300, 7)], {"labels": names(3)}),  # rows of seven are also those of rotated boxes
        *(
            ([table(*dims)], {"head": head})
            for head, dims in (("yolo", (4, 8400)), ("yolox", (25200, 85)), ("end_to_end", (300, 7)), ("rtdetr", (300, 4)))
        ),
        ([YOLO], {"head": "rtdetr"}),
        ([SCORES], {"head": "yolo"}),
        (END_TO_END, {"head": "rtdetr"}),
    ],
)
def test_outputs_of_no_head_are_described(outputs: list[Tensor], parameters: dict[str, Any]) -> None:
    described = ", ".join(f"{name} {data_type[5:]} {dims}" for name, data_type, dims in outputs)
    with pytest.raises(UnsupportedModel) as caught:
        spec_of(*outputs, **parameters)

    assert caught.value.detail.endswith(f"match no supported head: inputs images FP32 [3, 640, 640]; outputs {described}")


def test_anchors_are_those_of_the_input() -> None:
    image = table(3, 384, 640, name="images")

    assert spec_of(table(84, 5040), image=image).expect_head(DetectionHead).output_format is OutputFormat.YOLO_HEAD
    with pytest.raises(UnsupportedModel, match="match no supported head"):
        spec_of(YOLO, image=image)


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


@pytest.mark.parametrize("shape", [None, [10**9, 3], [17, 4]])
def test_pose_model_has_a_sensible_number_of_keypoints(shape: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"m is a pose model; its config must have .* `kpt_shape`"):
        spec_of(table(-1, 8400), metadata=repr({"task": "pose", "kpt_shape": shape}))


@pytest.mark.parametrize(
    ("output", "parameters", "classes"), [(YOLO, {}, 80), (RTDETR, {"head": "rtdetr"}, 80), (SCORES, {}, 1000)]
)
def test_each_class_has_one_label(output: Tensor, parameters: dict[str, Any], classes: int) -> None:
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
        ((table(9, name="labels"), table(9, name="conf")), ("n", "boxes", "conf", "labels")),
        ((table(9, name="class_scores"), table(9, data_type="TYPE_UINT8", name="ids")), ("n", "boxes", "class_scores", "ids")),
    ],
)
def test_four_tensors_are_identified(rest: tuple[Tensor, ...], order: tuple[str, ...]) -> None:
    """Shapes and types decide, whatever the order and names; the names decide only where classes are floats."""
    spec = spec_of(*rest, table(-1, 4, name="boxes"), table(1, name="n", data_type="TYPE_UINT32"))

    assert spec.output_names == order


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
