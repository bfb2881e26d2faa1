"""Requests of several encoded files, as the gateway sends them to a model that decodes by itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.triton.client import TritonClient
from app.triton.messages import InferResult, bytes_element_size, write_bytes_element


def file_tensor(file: bytes) -> NDArray[np.uint8]:
    """Make the element of a BYTES tensor."""
    tensor = np.empty(bytes_element_size(file), np.uint8)
    write_bytes_element(file, tensor)
    return tensor


async def infer_files(client: TritonClient, spec: ModelSpec, files: Sequence[bytes]) -> list[InferResult]:
    """Run one inference on several files; returns the result of each."""
    answer = await client.infer(spec, list(map(file_tensor, files)), timeout_seconds=30)
    return answer.split(spec, len(files))
