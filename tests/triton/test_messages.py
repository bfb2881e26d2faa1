"""Requests as Triton parses them, and responses as arrays."""

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.errors import InvalidModelOutput
from app.model.spec import ModelSpec, from_triton_config
from app.triton.messages import InferResult, bytes_element_size, infer_request, read_response, write_bytes_element
from app.triton.shared_memory import Arena, Slot
from tests.fakes.triton import CONFIG, SPEC, infer_response

BATCHED = from_triton_config({**CONFIG, "max_batch_size": 8}, "1")
IMAGE = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)


def parsed(
    spec: ModelSpec, *tensors: np.ndarray, timeout_seconds: float = 1.5, slot: Slot | None = None
) -> messages.ModelInferRequest:
    """Serialize a request, and parse it as Triton does."""
    data = infer_request(spec, tensors, timeout_seconds=timeout_seconds, request_id="abc", slot=slot)
    return messages.ModelInferRequest.FromString(data)


def test_a_request_names_model_input_and_outputs() -> None:
    request = parsed(SPEC, IMAGE)

    assert (request.model_name, request.model_version, request.id) == ("tiny", "", "abc")
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", "UINT8", [32, 32, 3])
    assert [output.name for output in request.outputs] == ["output0"]


def test_a_request_names_the_version_that_is_asked_for() -> None:
    pinned = msgspec.structs.replace(SPEC, version="7", is_pinned=True)

    assert parsed(pinned, IMAGE).model_version == "7"
    assert parsed(msgspec.structs.replace(SPEC, version="7"), IMAGE).model_version == ""


@pytest.mark.parametrize(("seconds", "microseconds"), [(1.5, 1_500_000), (0.00001, 10), (0, 1), (-3, 1)])
def test_the_timeout_is_in_microseconds_and_never_zero(seconds: float, microseconds: int) -> None:
    """Zero would mean no time-out at all."""
    assert parsed(SPEC, IMAGE, timeout_seconds=seconds).parameters["timeout"].int64_param == microseconds


def test_an_inline_tensor_is_part_of_the_request() -> None:
    request = parsed(SPEC, IMAGE)

    assert list(request.raw_input_contents) == [IMAGE.tobytes()]
    assert not request.inputs[0].parameters


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_tensors_of_every_size_are_parsed_back(nbytes: int) -> None:
    tensor = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    data = infer_request(SPEC, [tensor], timeout_seconds=1, request_id="abc", slot=None)
    request = messages.ModelInferRequest.FromString(data)

    assert list(request.raw_input_contents) == [tensor.tobytes()]
    assert len(request.SerializeToString()) == len(data)


def test_a_tensor_in_shared_memory_is_referred_to() -> None:
    arena = Arena(10_000)
    first, second = arena.take(5000), arena.take(5000)
    assert first
    assert second
    tensor = second.array((32, 32, 3), np.uint8)
    request = parsed(SPEC, tensor, slot=second)
    arena.close()

    parameters = request.inputs[0].parameters
    assert parameters["shared_memory_region"].string_param == arena.region
    assert parameters["shared_memory_offset"].int64_param == second.offset == 5000
    assert parameters["shared_memory_byte_size"].int64_param == 32 * 32 * 3
    assert not request.raw_input_contents


@pytest.mark.parametrize("images", [1, 3])
def test_a_batch_is_the_first_dimension(images: int) -> None:
    tensors = [IMAGE + index for index in range(images)]
    request = parsed(BATCHED, *tensors)

    assert list(request.inputs[0].shape) == [images, 32, 32, 3]
    assert request.raw_input_contents[0] == np.stack(tensors).tobytes()


def test_a_batch_in_shared_memory_is_one_piece() -> None:
    arena = Arena(4 * IMAGE.nbytes)
    slots = [slot for _ in range(4) if (slot := arena.take(IMAGE.nbytes))]
    tensors = [slot.array(SPEC.image_shape, np.uint8) for slot in slots[1:]]
    request = parsed(BATCHED, *tensors, slot=slots[1])
    arena.close()

    assert list(request.inputs[0].shape) == [3, 32, 32, 3]
    parameters = request.inputs[0].parameters
    assert parameters["shared_memory_offset"].int64_param == IMAGE.nbytes
    assert parameters["shared_memory_byte_size"].int64_param == 3 * IMAGE.nbytes


@pytest.mark.parametrize(
    ("data_type", "datatype"), [("TYPE_UINT8", "UINT8"), ("TYPE_FP16", "FP16"), ("TYPE_FP32", "FP32"), ("TYPE_STRING", "BYTES")]
)
def test_the_type_of_the_input_is_that_of_the_model(data_type: str, datatype: str) -> None:
    dims = [1] if datatype == "BYTES" else [32, 32, 3]
    tensor = {"name": "image", "data_type": data_type, "dims": dims}
    spec = from_triton_config({**CONFIG, "input": [tensor], "parameters": {"square": {"string_value": "32"}}}, "1")

    request = parsed(spec, np.zeros(dims, np.uint8))
    assert request.inputs[0].datatype == datatype
    assert list(request.inputs[0].shape) == dims


def test_every_output_is_requested() -> None:
    spec = msgspec.structs.replace(SPEC, output_names=("count", "boxes", "scores", "classes"))

    names = ["count", "boxes", "scores", "classes"]
    assert [output.name for output in parsed(spec, IMAGE).outputs] == names
    tells = msgspec.structs.replace(spec, tells_decoded=True)
    assert [output.name for output in parsed(tells, IMAGE).outputs] == [*names, "decoded"]


@pytest.mark.parametrize("data", [b"", b"GIF89a", bytes(70_000)], ids=["empty", "short", "long"])
def test_a_file_is_an_element_with_its_length_in_front(data: bytes) -> None:
    """The length is four bytes, little-endian."""
    element = np.full(bytes_element_size(data), 255, np.uint8)
    write_bytes_element(data, element)

    assert element.tobytes() == len(data).to_bytes(4, "little") + data


def test_the_outputs_of_an_answer_are_arrays() -> None:
    answer = infer_response(
        boxes=np.arange(8, dtype=np.float16).reshape(1, 2, 4),
        count=np.array([[2]], np.int64),
        empty=np.zeros((1, 0, 6), np.float32),
    )
    answer.model_version = "7"
    read = read_response(answer)

    assert read.version == "7"
    assert {name: (tensor.dtype.name, tensor.shape) for name, tensor in read.outputs.items()} == {
        "boxes": ("float16", (1, 2, 4)),
        "count": ("int64", (1, 1)),
        "empty": ("float32", (1, 0, 6)),
    }
    assert read.outputs["boxes"].ravel().tolist() == list(range(8))
    assert not read.outputs["boxes"].flags.writeable


def test_an_answer_that_is_no_message_is_an_invalid_output() -> None:
    """For such a response, gRPC returns None."""
    with pytest.raises(InvalidModelOutput, match="cannot be read"):
        read_response(None)


def test_an_answer_without_outputs_has_none() -> None:
    """`read_response` does not check whether an output is missing; `decode_outputs` does."""
    assert read_response(messages.ModelInferResponse(model_version="1")).outputs == {}


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [("FP32", [2, 6], b""), ("FP32", [2, 6], b"1234"), ("FP32", [-1, 6, 0], b""), ("BYTES", [1], b"1234"), ("NONE", [1], b"1")],
)
def test_an_inconsistent_tensor_is_an_invalid_output(datatype: str, shape: list[int], content: bytes) -> None:
    """For example, Triton's Python backend returns empty tensors with an incompatible numpy."""
    answer = messages.ModelInferResponse()
    answer.outputs.add(name="output0", datatype=datatype, shape=shape)
    answer.raw_output_contents.append(content)

    with pytest.raises(InvalidModelOutput, match="output0"):
        read_response(answer)


def test_the_result_of_a_batch_is_split_by_image() -> None:
    boxes, counts = np.arange(24, dtype=np.float32).reshape(3, 2, 4), np.array([[2], [0], [1]], np.int32)
    parts = InferResult({"boxes": boxes, "count": counts}, "7").split(BATCHED, 3)

    assert [part.version for part in parts] == ["7"] * 3
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(part.outputs["boxes"], boxes[index : index + 1])
        np.testing.assert_array_equal(part.outputs["count"], counts[index : index + 1])


def test_the_result_of_one_image_is_not_split() -> None:
    """The model may have no batch dimension."""
    result = InferResult({"count": np.array(5)}, "1")

    assert result.split(SPEC, 1) == [result]


@pytest.mark.parametrize("shape", [(), (1, 4), (2, 4), (4, 4)])
def test_a_result_for_another_number_of_images_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidModelOutput, match=r"tiny returned boxes of shape .* for a batch of 3"):
        InferResult({"boxes": np.zeros(shape)}, "1").split(BATCHED, 3)
