"""Weights that PyTorch saved are read without running what is in the file."""

import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.zoo.networks.torch_weights import read_weights

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


def test_tensors_may_share_a_storage_and_be_transposed(file: Path) -> None:
    """Offsets and strides count elements, not bytes."""
    second = mapping(kernel=tensor("a", (3, 2), (1, 3), offset=6), count=tensor("b", (1,), (1,), kind="LongStorage"))
    file.write_bytes(saved(second))
    kernel = read_weights(file)["kernel"]

    assert kernel.tolist() == [[6, 9], [7, 10], [8, 11]]
    assert kernel.flags.c_contiguous


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        pytest.param((13,), (1,), 0, id="too long"),
        pytest.param((2,), (1,), 11, id="behind the end"),
        pytest.param((2,), (1,), -2, id="before the start"),
        pytest.param((-2,), (1,), 0, id="negative size"),
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


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("torch", "load"), ("numpy", "dtype")])
def test_function_that_is_not_allowed_is_not_called(file: Path, tmp_path: Path, module: str, name: str) -> None:
    trace = tmp_path / "trace"
    file.write_bytes(saved(name_of(module, name) + row(text(f"touch {trace}")) + pickle.REDUCE + pickle.STOP))

    with pytest.raises(ValueError, match=f"{module}.{name} is not allowed"):
        read_weights(file)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
        pytest.param(saved(BOTH, magic=1), id="another magic number"),
        pytest.param(saved(pickle.NONE + pickle.STOP), id="no dictionary"),
        pytest.param(saved(mapping(kernel=number(1))), id="no tensor"),
        pytest.param(saved(mapping(kernel=tensor("c", (1,), (1,)))), id="unknown storage"),
    ],
)
def test_other_files_are_rejected(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    with pytest.raises(ValueError, match=r"not weights that PyTorch saved before version 1\.6"):
        read_weights(file)


def test_file_that_was_cut_short_is_rejected(file: Path) -> None:
    content = saved(BOTH)
    for size in range(0, len(content) - 1, len(content) // 12):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match="not weights"):
            read_weights(file)


@given(place=st.integers(0, len(saved(BOTH)) - 1), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_is_read_or_rejected(file: Path, place: int, byte: int) -> None:
    content = bytearray(saved(BOTH))
    content[place] = byte
    file.write_bytes(content)
    with suppress(ValueError):
        assert all(isinstance(values, np.ndarray) for values in read_weights(file).values())
