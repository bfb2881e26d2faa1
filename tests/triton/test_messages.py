"""Requests as Triton parses them, and responses as arrays."""

import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.errors import InvalidModelOutput
from app.model.spec import ModelSpec, from_triton_config
from app.triton.messages import InferResult, infer_request, read_response
from app.triton.shared_memory import Arena, Slot
from tests.fakes.triton import CONFIG, SPEC

BATCHED = from_triton_config({**CONFIG, "max_batch_size": 8}, "1")
IMAGE = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)


def parsed(spec: ModelSpec, *tensors: np.ndarray, seconds: float = 1.5, slot: Slot | None = None) -> messages.ModelInferRequest:
    """Serialize a request, and parse it as Triton does."""
    data = infer_request(spec, tensors, timeout_seconds=seconds, request_id="abc", slot=slot, priority=2)
    return messages.ModelInferRequest.FromString(data)


@pytest.mark.parametrize(("is_pinned", "version"), [(True, "7"), (False, "")])
def test_request_has_what_the_model_needs(version: str, *, is_pinned: bool) -> None:
    request = parsed(msgspec.structs.replace(SPEC, version="7", is_pinned=is_pinned, tells_decoded=True), IMAGE)
    (sent,) = request.inputs

    assert (request.model_name, request.model_version, request.id) == ("tiny", version, "abc")
    assert (sent.name, sent.datatype, list(sent.shape), len(sent.parameters)) == ("image", "UINT8", [32, 32, 3], 0)
    assert [output.name for output in request.outputs] == ["output0", "decoded"]
    assert list(request.raw_input_contents) == [IMAGE.tobytes()]
    assert request.parameters["priority"].uint64_param == 2


@pytest.mark.parametrize(("seconds", "microseconds"), [(1.5, 1_500_000), (0.00001, 10), (0, 1), (-3, 1)])
def test_timeout_is_in_microseconds_and_never_zero(seconds: float, microseconds: int) -> None:
    """Zero would mean no time-out at all."""
    assert parsed(SPEC, IMAGE, seconds=seconds).parameters["timeout"].int64_param == microseconds


@pytest.mark.parametrize("nbytes", [0, 127, 128, 16_383, 16_384, 2_097_152])
def test_tensors_of_every_size_are_parsed_back(nbytes: int) -> None:
    tensor = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)

    assert list(parsed(SPEC, tensor).raw_input_contents) == [tensor.tobytes()]


def test_batch_is_one_piece_inline_and_in_shared_memory() -> None:
    arena = Arena(4 * IMAGE.nbytes)
    slots = [slot for _ in range(4) if (slot := arena.take(IMAGE.nbytes))]
    tensors = [slot.array(SPEC.image_shape, np.uint8) for slot in slots[1:]]
    for number, tensor in enumerate(tensors):
        tensor[:] = IMAGE + number
    inline, shared = parsed(BATCHED, *tensors), parsed(BATCHED, *tensors, slot=slots[1])
    arena.close()

    assert list(inline.inputs[0].shape) == list(shared.inputs[0].shape) == [3, 32, 32, 3]
    assert inline.raw_input_contents[0] == np.stack(tensors).tobytes()
    assert not shared.raw_input_contents
    parameters = shared.inputs[0].parameters
    assert parameters["shared_memory_region"].string_param == arena.region
    assert parameters["shared_memory_offset"].int64_param == IMAGE.nbytes
    assert parameters["shared_memory_byte_size"].int64_param == 3 * IMAGE.nbytes


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [("FP32", [2, 6], b""), ("FP32", [2, 6], b"1234"), ("BYTES", [1], b"1234"), ("NONE", [1], b"1")],
)
def test_inconsistent_tensor_is_an_invalid_output(datatype: str, shape: list[int], content: bytes) -> None:
    """For example, Triton's Python backend returns empty tensors with an incompatible numpy."""
    answer = messages.ModelInferResponse()
    answer.outputs.add(name="output0", datatype=datatype, shape=shape)
    answer.raw_output_contents.append(content)
    with pytest.raises(InvalidModelOutput, match="output0"):
        read_response(answer)


def test_result_of_a_batch_is_split_by_image() -> None:
    boxes = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    parts = InferResult({"boxes": boxes}, "7").split(BATCHED, 3)
    for index, part in enumerate(parts):
        assert (part.version, part.outputs["boxes"].tolist()) == ("7", boxes[index : index + 1].tolist())

    result = InferResult({"count": np.array(5)}, "1")  # of a model without a batch dimension
    assert result.split(SPEC, 1) == [result]


@pytest.mark.parametrize("shape", [(), (2, 4), (4, 4)])
def test_result_for_another_number_of_images_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidModelOutput, match=r"tiny returned boxes of shape .* for a batch of 3"):
        InferResult({"boxes": np.zeros(shape)}, "1").split(BATCHED, 3)
