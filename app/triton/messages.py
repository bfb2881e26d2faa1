"""Serialize inference requests for Triton, and read the responses as arrays.

tritonclient's helpers are not used, because they check and copy tensors again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from app.errors import InvalidModelOutput
from app.model.spec import OUTPUT_DTYPES, ModelSpec
from app.triton.shared_memory import Slot

_RAW_INPUT_TAG = service_pb2.ModelInferRequest(raw_input_contents=[b""]).SerializeToString()[:1]
"""Protobuf tag that precedes the length of the tensor in a serialized request."""
_LENGTH_BYTES = 4


class InferResult(NamedTuple):
    """The response to one inference."""

    outputs: dict[str, NDArray[Any]]
    """Tensors by name, with a first batch dimension if the model has one."""
    version: str
    """Version of the model that answered."""

    def split(self, spec: ModelSpec, images: int) -> list["InferResult"]:
        """Return a separate result for each image, as views; raises InvalidModelOutput for tensors of another number of images."""
        if images == 1:
            return [self]
        for name, tensor in self.outputs.items():
            if tensor.ndim == 0 or len(tensor) != images:
                raise InvalidModelOutput(f"{spec.name} returned {name} of shape {tensor.shape} for a batch of {images}")
        parts = [{name: tensor[index : index + 1] for name, tensor in self.outputs.items()} for index in range(images)]
        return [InferResult(part, self.version) for part in parts]


def bytes_element_size(data: bytes) -> int:
    """Return the size in bytes of a file as an element of a BYTES tensor."""
    return _LENGTH_BYTES + len(data)


def write_bytes_element(data: bytes, out: NDArray[np.uint8]) -> None:
    """Write a file as an element of a BYTES tensor, UINT8 (`bytes_element_size(data)`,): its length, little-endian, and itself."""
    out[:_LENGTH_BYTES] = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    out[_LENGTH_BYTES:] = np.frombuffer(data, np.uint8)


def infer_request(  # noqa: PLR0913 - the parts of a request
    spec: ModelSpec,
    tensors: Sequence[NDArray[Any]],
    *,
    timeout_seconds: float,
    request_id: str,
    slot: Slot | None,
    priority: int = 0,
) -> bytes:
    """Serialize an inference request; arguments as for `TritonClient.infer`."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    message = service_pb2.ModelInferRequest(model_name=spec.name, id=request_id)
    if spec.is_pinned:
        message.model_version = spec.version
    message.parameters["timeout"].int64_param = max(1, int(timeout_seconds * 1e6))
    if priority:
        message.parameters["priority"].uint64_param = priority
    shape = spec.batch_shape(len(tensors), tensors[0].shape)
    tensor_message = message.inputs.add(name=spec.input_name, datatype=spec.datatype, shape=shape)
    for name in spec.requested_names:
        message.outputs.add(name=name)
    if slot is None:
        # Serialized messages can be concatenated. This copies the pixels once; protobuf would copy them three times.
        return b"".join((message.SerializeToString(), _RAW_INPUT_TAG, _varint(nbytes), *(tensor.data for tensor in tensors)))
    tensor_message.parameters["shared_memory_region"].string_param = slot.arena.region
    tensor_message.parameters["shared_memory_byte_size"].int64_param = nbytes
    tensor_message.parameters["shared_memory_offset"].int64_param = slot.offset
    return bytes(message.SerializeToString())


def _varint(number: int) -> bytes:
    """Encode a protobuf varint: seven bits per byte, lowest bits first; the top bit is set if more bytes follow."""
    written = bytearray()
    while number > 0x7F:  # noqa: PLR2004
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def read_response(message: service_pb2.ModelInferResponse | None) -> InferResult:
    """Return the output tensors of a response as read-only views.

    Raises InvalidModelOutput if gRPC could not parse it (None), or a tensor's size does not match its shape, or it is not numeric.
    """
    if message is None:
        raise InvalidModelOutput("Triton's answer cannot be read")
    outputs = {}
    for output, content in zip(message.outputs, message.raw_output_contents, strict=False):
        try:
            outputs[output.name] = np.frombuffer(content, OUTPUT_DTYPES[output.datatype]).reshape(tuple(output.shape))
        except (ValueError, KeyError) as error:
            raise InvalidModelOutput(f"{output.name} is {len(content)} bytes for {output.datatype} {list(output.shape)}") from error
    return InferResult(outputs, message.model_version)


def to_json(value: Any, field: Any = None) -> Any:  # noqa: ANN401 - generated messages have no types
    """Convert a message to JSON as Triton's HTTP protocol has it: with defaults, and 64-bit integers as numbers."""
    match value:
        case Message():
            fields = [each for each in value.DESCRIPTOR.fields if not each.has_presence or value.HasField(each.name)]
            return {each.name: to_json(getattr(value, each.name), each) for each in fields}
        case Mapping():
            return {str(key): to_json(each) for key, each in value.items()}
        case Sequence() if not isinstance(value, str):
            return [to_json(each, field) for each in value]
    return field.enum_type.values_by_number[value].name if field and field.enum_type else value
