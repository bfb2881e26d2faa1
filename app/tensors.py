"""Tensors in Triton's messages: one inference as a request, its answer as arrays.

Written by hand, since tritonclient's helpers check and copy again what is known here.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import triton_to_np_dtype

from app.arena import Slot
from app.contract import Contract
from app.errors import ModelNonsense

_DATATYPES: dict[type[np.generic] | None, str] = {np.uint8: "UINT8", np.float16: "FP16", np.float32: "FP32", None: "BYTES"}
_NUMBERS = {
    name: np.dtype(triton_to_np_dtype(name))
    for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BOOL")
}
_RAW_INPUT = messages.ModelInferRequest(raw_input_contents=[b""]).SerializeToString()[:1]
"""What stands before the length of the pixels in a serialized request."""


class Answer(NamedTuple):
    """What Triton returned for one picture."""

    outputs: dict[str, NDArray[Any]]
    """By name."""
    version: str
    """Of the model that answered."""


def of_file(data: bytes, into: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Write a file as the one element of a BYTES tensor: its length, four bytes little-endian, then itself.

    Args:
        data: The file.
        into: UINT8 (n,) with room for it; None makes a new array.

    Returns:
        UINT8 (4 + length of the file,), the beginning of `into` if there is one.
    """
    tensor = np.empty(4 + len(data), np.uint8) if into is None else into[: 4 + len(data)]
    tensor[:4] = np.frombuffer(len(data).to_bytes(4, "little"), np.uint8)
    tensor[4:] = np.frombuffer(data, np.uint8)
    return tensor


def request(model: Contract, tensor: NDArray[Any], timeout_seconds: float, request_id: str, slot: Slot | None) -> bytes:
    """Serialize a request about one tensor.

    Args:
        model: The contract of the model to ask.
        tensor: The model's input, contiguous; for a file as `of_file` writes it.
        timeout_seconds: For Triton's queue, which drops what has waited longer.
        request_id: For Triton's own log.
        slot: What `tensor` begins in; without one, the tensor goes along.
    """
    message = messages.ModelInferRequest(model_name=model.name, id=request_id)
    message.parameters["timeout"].int64_param = max(1, int(timeout_seconds * 1e6))
    given = message.inputs.add(name=model.input, datatype=_DATATYPES[model.dtype], shape=model.shape)
    for output in model.outputs:
        message.outputs.add(name=output)
    if slot is None:
        # Serialized messages may be joined. So the pixels are copied once here; protobuf would do it three times.
        return b"".join((message.SerializeToString(), _RAW_INPUT, _varint(tensor.nbytes), tensor.data))
    given.parameters["shared_memory_region"].string_param = slot.arena.name
    given.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
    given.parameters["shared_memory_offset"].int64_param = slot.offset
    return bytes(message.SerializeToString())


def _varint(number: int) -> bytes:
    """Write a length as protobuf does: seven bits a byte, the lowest first, the top bit where more follow."""
    written = bytearray()
    while number > 0x7F:  # noqa: PLR2004
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def answer(message: messages.ModelInferResponse) -> Answer:
    """View the output tensors; read-only.

    Raises:
        ModelNonsense: The bytes of one do not fill its shape, or it is none of numbers.
    """
    outputs = {}
    for output, content in zip(message.outputs, message.raw_output_contents, strict=False):
        try:
            outputs[output.name] = np.frombuffer(content, _NUMBERS[output.datatype]).reshape(tuple(output.shape))
        except (ValueError, KeyError) as error:
            raise ModelNonsense(f"{output.name} is {len(content)} bytes for {output.datatype} {list(output.shape)}") from error
    return Answer(outputs, message.model_version)
