"""What is read out of a Triton config, and what a frame becomes as a tensor."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.contract import Contract, Form, Layout, read
from app.errors import UnsupportedLayout

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


def contract(*outputs: Tensor, image: Tensor = IMAGES, batch: int = 1, **parameters: str) -> Contract:
    return read(config(*(outputs or (SIX_COLUMNS,)), image=image, batch=batch, **parameters), "1")


def test_contract_of_a_plain_model() -> None:
    """Without parameters everything has its documented default."""
    assert contract(SIX_COLUMNS) == Contract(
        name="m",
        version="1",
        backend="onnxruntime",
        device="cpu",
        input="images",
        dtype=np.float32,
        form=Form.CHW,
        batched=True,
        frame=(640, 640),
        outputs=("output0",),
        layout=Layout.SIX_COLUMNS,
        centred=True,
        enlarge=True,
        pad=114,
        channels="RGB",
        scale=255.0,
        normalized=False,
        iou=0.7,
        labels=(),
        source="",
        licence="",
    )


def test_every_parameter_is_read() -> None:
    """Each parameter of the documented list is taken from its text."""
    given = contract(
        SIX_COLUMNS,
        image=("images", "TYPE_FP32", [3, -1, -1]),
        labels="person,traffic light",
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
    )

    assert given.labels == ("person", "traffic light")
    assert (given.centred, given.enlarge, given.pad) == (False, False, 0)
    assert (given.channels, given.scale, given.frame) == ("BGR", 1.5, (416, 416))
    assert (given.normalized, given.iou) == (True, 0.45)
    assert (given.source, given.licence) == ("https://example.org/m", "MIT")


def test_parameters_of_others_are_ignored() -> None:
    """A parameter that Triton or a backend reads is none of our business."""
    assert contract(SIX_COLUMNS, execution_mode="1", optimization="x") == contract(SIX_COLUMNS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("placement", "centre"),
        ("placement", ""),
        ("enlarge", "yes"),
        ("pad", "-1"),
        ("pad", "256"),
        ("pad", "grey"),
        ("channels", "rgb"),
        ("scale", "0"),
        ("scale", "-1"),
        ("scale", "nan"),
        ("scale", "inf"),
        ("square", "31"),
        ("square", "8193"),
        ("square", "640.5"),
        ("box_units", "percent"),
        ("iou", "1.1"),
        ("iou", "nan"),
    ],
)
def test_invalid_parameter_is_named(name: str, value: str) -> None:
    """A parameter that is out of range or of the wrong type makes the model unusable, and is named."""
    parameter: dict[str, Any] = {name: value}

    with pytest.raises(UnsupportedLayout, match=rf"the config of m has a parameter that is not valid: .*{name}"):
        contract(SIX_COLUMNS, **parameter)


@pytest.mark.parametrize("config", [{}, {"name": 1}, {"name": "m", "input": 5}, {"name": "m", "input": [{"name": "a"}]}])
def test_config_of_another_shape_is_unsupported(config: dict[str, Any]) -> None:
    """What is no ModelConfig is refused, not stumbled over."""
    with pytest.raises(UnsupportedLayout):
        read(config, "1")


def test_numbers_may_be_text() -> None:
    """Triton's JSON writes 64-bit numbers as strings."""
    given = contract(("output0", "TYPE_FP32", ["300", "6"]), image=("images", "TYPE_FP32", ["3", "480", "640"]))

    assert (given.layout, given.frame) == (Layout.SIX_COLUMNS, (640, 480))


@pytest.mark.parametrize(
    ("kinds", "device"), [([], "cpu"), (["KIND_CPU"], "cpu"), (["KIND_AUTO"], "cpu"), (["KIND_CPU", "KIND_GPU"], "gpu")]
)
def test_device_is_that_of_the_instances(kinds: list[str], device: str) -> None:
    """One instance on a GPU makes the model a GPU model."""
    given = read(config(SIX_COLUMNS) | {"instance_group": [{"kind": kind} for kind in kinds]}, "1")

    assert given.device == device


def test_platform_stands_in_for_the_backend() -> None:
    """Older configs name a platform only."""
    given = read(config(SIX_COLUMNS) | {"backend": "", "platform": "tensorrt_plan"}, "7")

    assert (given.backend, given.version) == ("tensorrt_plan", "7")


@pytest.mark.parametrize(
    ("dims", "form", "frame"),
    [
        ([3, 480, 640], Form.CHW, (640, 480)),
        ([480, 640, 3], Form.HWC, (640, 480)),
        ([3, -1, -1], Form.CHW, (640, 640)),
        ([-1, -1, 3], Form.HWC, (640, 640)),
        ([3, -1, 320], Form.CHW, (320, 640)),
    ],
)
def test_channels_are_found_first_or_last(dims: list[int | str], form: Form, frame: tuple[int, int]) -> None:
    """The dimension of 3 tells the form, the other two are height and width."""
    given = contract(image=("images", "TYPE_FP32", dims))

    assert (given.form, given.frame, given.batched) == (form, frame, True)


@pytest.mark.parametrize(
    ("parameters", "frame"),
    [
        ({}, (640, 640)),
        ({"metadata": "{'imgsz': [320, 320]}"}, (320, 320)),
        ({"metadata": "{'imgsz': 416}"}, (416, 416)),
        ({"metadata": "{'imgsz': []}"}, (640, 640)),
        ({"metadata": "{'imgsz': '320'}"}, (640, 640)),
        ({"metadata": "{'imgsz': -1}"}, (640, 640)),
        ({"square": "512"}, (512, 512)),
        ({"square": "512", "metadata": "{'imgsz': [320, 320]}"}, (512, 512)),
    ],
)
def test_dynamic_frame_is_told_by_the_parameters(parameters: dict[str, Any], frame: tuple[int, int]) -> None:
    """`square` counts before the exporter's `imgsz`, and 640 is the last resort."""
    assert contract(image=("images", "TYPE_FP32", [3, -1, -1]), **parameters).frame == frame


def test_fixed_frame_counts_before_parameters() -> None:
    """A shape that says the size is believed."""
    assert contract(square="512", metadata="{'imgsz': [320, 320]}").frame == (640, 640)


@pytest.mark.parametrize(
    ("batch", "image", "output", "batched"),
    [
        (8, [3, 640, 640], [300, 6], True),
        (0, [1, 3, 640, 640], [1, 300, 6], True),
        (0, [-1, 3, 640, 640], [-1, 300, 6], True),
        (0, [3, 640, 640], [300, 6], False),
    ],
)
def test_batch_dimension_is_found(batch: int, image: list[int | str], output: list[int | str], *, batched: bool) -> None:
    """Triton's own batching, a batch dimension written out, or none at all."""
    given = contract(("o", "TYPE_FP32", output), image=("i", "TYPE_FP32", image), batch=batch)

    assert (given.batched, given.frame, given.layout) == (batched, (640, 640), Layout.SIX_COLUMNS)


@pytest.mark.parametrize(("data_type", "dtype"), [("TYPE_UINT8", np.uint8), ("TYPE_FP32", np.float32), ("TYPE_FP16", np.float16)])
def test_type_of_the_input(data_type: str, dtype: type) -> None:
    """Bytes, floats and half floats are taken."""
    assert contract(image=("images", data_type, [3, 640, 640])).dtype is dtype


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("dims", [[1], [-1]])
def test_model_that_takes_the_file(dims: list[int | str], batch: int) -> None:
    """A BYTES input is the file itself, and `square` says how large the model makes it."""
    given = contract(*END_TO_END, image=("file", "TYPE_STRING", dims), batch=batch, square="640")

    assert (given.form, given.dtype, given.frame, given.batched) == (Form.FILE, None, (640, 640), batch > 0)


def test_model_that_takes_the_file_must_say_its_frame() -> None:
    """Without `square` nobody knows what its boxes count."""
    with pytest.raises(UnsupportedLayout, match="m takes the file itself; its config must say `square`"):
        contract(*END_TO_END, image=("file", "TYPE_STRING", [1]))


@pytest.mark.parametrize(
    ("output", "layout"),
    [
        (SIX_COLUMNS, Layout.SIX_COLUMNS),
        (("o", "TYPE_FP32", [-1, 6]), Layout.SIX_COLUMNS),
        (("o", "TYPE_FP16", [100, 6]), Layout.SIX_COLUMNS),
        (YOLO_HEAD, Layout.YOLO_HEAD),
        (("o", "TYPE_FP32", [5, 8400]), Layout.YOLO_HEAD),
        (("o", "TYPE_FP32", [6, 8400]), Layout.YOLO_HEAD),
        (("o", "TYPE_FP32", [84, -1]), Layout.YOLO_HEAD),
        (YOLOX_HEAD, Layout.YOLOX_HEAD),
        (("o", "TYPE_FP32", [8400, 6]), Layout.YOLOX_HEAD),
    ],
)
def test_single_output_is_told_by_its_shape(output: Tensor, layout: Layout) -> None:
    """Rows of six, a YOLO head or a YOLOX head, whose anchors are those of the frame."""
    given = contract(output)

    assert (given.layout, given.outputs) == (layout, (output[0],))


@pytest.mark.parametrize(
    ("image", "anchors"), [([3, 416, 416], 3549), ([3, 480, 640], 6300), ([3, -1, -1], 8400), ([640, 640, 3], 8400)]
)
def test_anchors_follow_the_frame(image: list[int | str], anchors: int) -> None:
    """A YOLOX head has one row per cell of this very frame."""
    assert contract(("o", "TYPE_FP32", [anchors, 85]), image=("i", "TYPE_FP32", image)).layout is Layout.YOLOX_HEAD


def test_head_with_its_batch_written_out() -> None:
    """The batch dimension is no part of a head's shape."""
    given = contract(("o", "TYPE_FP32", [1, 8400, 85]), image=("i", "TYPE_FP32", [1, 3, 640, 640]), batch=0)

    assert (given.layout, given.batched) == (Layout.YOLOX_HEAD, True)


def test_yolox_has_its_own_defaults() -> None:
    """The published YOLOX models take BGR, 0 to 255, at the top left."""
    given = contract(YOLOX_HEAD)

    assert (given.channels, given.scale, given.centred) == ("BGR", 1.0, False)


def test_yolox_defaults_give_way() -> None:
    """What the config says counts before what YOLOX usually is."""
    given = contract(YOLOX_HEAD, channels="RGB", scale="255", placement="center")

    assert (given.channels, given.scale, given.centred) == ("RGB", 255.0, True)


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
def test_four_tensors_are_told_apart(tensors: tuple[Tensor, ...], order: tuple[str, ...]) -> None:
    """By shape and type, and by name only where classes are floats, whatever the order and names."""
    given = contract(*tensors)

    assert (given.layout, given.outputs) == (Layout.END_TO_END, order)


def test_four_tensors_with_their_batch_written_out() -> None:
    """The batch dimension is no part of the four shapes."""
    outputs = [(name, data_type, [1, *dims]) for name, data_type, dims in END_TO_END]

    given = contract(*outputs, image=("i", "TYPE_FP32", [1, 3, 640, 640]), batch=0)

    assert given.outputs == ("num_dets", "det_boxes", "det_scores", "det_classes")


@pytest.mark.parametrize(
    "outputs",
    [
        (),
        (("o", "TYPE_FP32", [1000]),),
        (("o", "TYPE_FP32", [300, 7]),),
        (("o", "TYPE_FP32", [4, 8400]),),
        (("o", "TYPE_FP32", [8400, 5]),),
        (("o", "TYPE_FP32", [1, 300, 6]),),
        (SIX_COLUMNS, ("other", "TYPE_FP32", [84, 8400])),
        (("o", "TYPE_STRING", [300, 6]),),
        END_TO_END[:3],
        (*END_TO_END[:3], ("det_classes", "TYPE_FP32", [100, 1])),
        (*END_TO_END[:3], ("other", "TYPE_FP32", [100])),
        (*END_TO_END[:3], ("det_classes", "TYPE_STRING", [100])),
        (("n", "TYPE_FP32", [1]), *END_TO_END[1:]),
    ],
)
def test_unknown_outputs_are_described(outputs: tuple[Tensor, ...]) -> None:
    """What no adapter fits is refused, and the message says what there was."""
    described = ", ".join(f"{name} {data_type[5:]} {dims}" for name, data_type, dims in outputs) or "none"

    with pytest.raises(UnsupportedLayout) as caught:
        read(config(*outputs), "1")

    assert caught.value.detail == f"no adapter fits m: inputs images FP32 [3, 640, 640]; outputs {described}"


@pytest.mark.parametrize(
    "image",
    [
        ("images", "TYPE_FP32", [1, 640, 640]),
        ("images", "TYPE_FP32", [640, 640]),
        ("images", "TYPE_FP32", [640, 3, 640]),
        ("images", "TYPE_FP32", [1, 3, 640, 640]),
        ("images", "TYPE_INT32", [3, 640, 640]),
        ("images", "TYPE_STRING", [1, 1]),
        ("images", "TYPE_STRING", [3, 640, 640]),
    ],
)
def test_unknown_input_is_described(image: Tensor) -> None:
    """An input that is no picture is refused, and the message says what it was."""
    with pytest.raises(UnsupportedLayout) as caught:
        contract(image=image)

    assert f"inputs images {image[1][5:]} {image[2]};" in caught.value.detail


@pytest.mark.parametrize(
    ("images", "described"), [((), "none"), ((IMAGES, IMAGES), "images FP32 [3, 640, 640], images FP32 [3, 640, 640]")]
)
def test_there_is_one_input(images: tuple[Tensor, ...], described: str) -> None:
    """A model of no input or of several is not one of ours."""
    with pytest.raises(UnsupportedLayout) as caught:
        read(config(SIX_COLUMNS) | {"input": tensors(*images)}, "1")

    assert f"inputs {described};" in caught.value.detail


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [
        ({"labels": "cat"}, ("cat",)),
        ({"labels": "cat,dog"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 'cat', 1: 'dog'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {1: 'dog', 0: 'cat'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 7}}"}, ("7",)),
        ({"labels": "cat", "metadata": "{'names': {0: 'dog'}}"}, ("cat",)),
        ({"labels": ""}, ()),
    ],
)
def test_labels_are_found(parameters: dict[str, Any], labels: tuple[str, ...]) -> None:
    """Our own parameter counts before the exporter's metadata; without either there are none."""
    assert contract(**parameters).labels == labels


@pytest.mark.parametrize(
    "metadata",
    [
        "not python",
        "{",
        "\0",
        "[1, 2]",
        "{[]: 1}",
        "{'names': ['cat', 'dog']}",
        "{'names': {0: 'cat', 2: 'dog'}}",
        "{'names': {'0': 'cat'}}",
        "{'names': {0: 'cat', 'x': 'dog'}}",
        "{'names': {0: 'cat', None: 'dog'}}",
        "{'names': 3, 'imgsz': {}}",
        "__import__('os').getcwd()",
        "(" * 300,
        "1+" * 5000 + "1",
        "-" * 100_000 + "1",
    ],
)
def test_malformed_metadata_is_ignored(metadata: str) -> None:
    """Metadata that is not what the exporter writes leaves the defaults."""
    given = contract(image=("images", "TYPE_FP32", [3, -1, -1]), metadata=metadata)

    assert (given.labels, given.frame) == ((), (640, 640))


@given(st.text("{}[]()'\",:0123456789 abnmesigz-+\\", max_size=40))
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_metadata_never_breaks_a_model(metadata: str) -> None:
    """Whatever the text, the model keeps its layout."""
    assert contract(metadata=metadata).layout is Layout.SIX_COLUMNS


PIXELS = np.random.default_rng(4).integers(0, 256, (4, 6, 3), np.uint8)


def filled(model: Contract, frame: NDArray[np.uint8]) -> NDArray[Any]:
    """Write a frame into a tensor as the model describes it."""
    assert model.dtype is not None
    tensor = np.zeros(model.shape, model.dtype)
    assert tensor.nbytes == model.input_bytes
    model.fill(tensor, frame)
    return tensor


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize(("data_type", "dtype"), [("TYPE_UINT8", np.uint8), ("TYPE_FP32", np.float32), ("TYPE_FP16", np.float16)])
@pytest.mark.parametrize("dims", [[3, 4, 6], [4, 6, 3]])
def test_frame_becomes_the_tensor(dims: list[int | str], data_type: str, dtype: type, channels: str, batch: int) -> None:
    """Order of axes and channels, type, scale and batch are the contract's; only a frame as it is needs no copy."""
    model = contract(image=("images", data_type, dims), batch=batch, channels=channels, scale="127.5")
    expected = PIXELS if channels == "RGB" else PIXELS[:, :, ::-1]
    expected = expected.transpose(2, 0, 1) if dims[0] == 3 else expected
    values = expected if dtype is np.uint8 else (expected / np.float32(127.5)).astype(dtype)

    tensor = filled(model, PIXELS)

    np.testing.assert_array_equal(tensor, values[None] if batch else values)
    assert model.is_frame is (dtype is np.uint8 and dims[0] == 4 and channels == "RGB")


def test_scale_of_one_keeps_the_bytes() -> None:
    """YOLOX's floats are 0 to 255."""
    model = contract(YOLOX_HEAD)
    frame = np.random.default_rng(5).integers(0, 256, (*model.frame[::-1], 3), np.uint8)

    np.testing.assert_array_equal(filled(model, frame)[0, ::-1], frame.transpose(2, 0, 1).astype(np.float32))
