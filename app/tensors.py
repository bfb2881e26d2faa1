"""Tensors in Triton's messages: one inference as a request, its answer as arrays.

Written by hand, since tritonclient's helpers check and copy again what is known here.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from app.arena import Slot
from app.contract import Contract
from app.errors import ModelNonsense

_DATATYPES = {np.uint8: "UINT8", np.float16: "FP16", np.float32: "FP32", np.object_: "BYTES"}


def request(
    model: Contract, tensor: NDArray[Any], timeout_seconds: float, request_id: str, slot: Slot | None
) -> messages.ModelInferRequest:
    """Ask a model about one tensor, which lies in `slot` or, without one, goes along.

    `timeout_seconds` is for Triton's queue, which drops what has waited longer.
    """
    message = messages.ModelInferRequest(model_name=model.name, id=request_id)
    message.parameters["timeout"].int64_param = max(1, int(timeout_seconds * 1e6))
    given = message.inputs.add(name=model.input, datatype=_DATATYPES[tensor.dtype.type], shape=tensor.shape)
    for output in model.outputs:
        message.outputs.add(name=output)
    if slot is not None:
        given.parameters["shared_memory_region"].string_param = slot.arena.name
        given.parameters["shared_memory_byte_size"].int64_param = tensor.nbytes
        given.parameters["shared_memory_offset"].int64_param = slot.offset
    elif tensor.dtype == np.object_:
        message.raw_input_contents.append(serialize_byte_tensor(tensor).item())
    else:
        message.raw_input_contents.append(tensor.tobytes())
    return message


def outputs(answer: messages.ModelInferResponse) -> dict[str, NDArray[Any]]:
    """View the output tensors, by name; read-only.

    Raises:
        ModelNonsense: The bytes of one do not fill its shape, or it is none of numbers.
    """
    found = {}
    for output, content in zip(answer.outputs, answer.raw_output_contents, strict=False):
        try:
            found[output.name] = np.frombuffer(content, triton_to_np_dtype(output.datatype)).reshape(output.shape)
        except (ValueError, TypeError) as error:
            raise ModelNonsense(f"{output.name} is {len(content)} bytes for {output.datatype} {list(output.shape)}") from error
    return found
