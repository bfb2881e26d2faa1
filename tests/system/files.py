"""Requests of several encoded files, as the gateway sends them to a model that decodes by itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.specs import SpecCache


def file_tensor(files: Sequence[bytes]) -> NDArray[np.uint8]:
    """Write files one behind the other, as elements of a BYTES tensor."""
    return np.frombuffer(b"".join(len(file).to_bytes(4, "little") + file for file in files), np.uint8)


async def infer_files(client: TritonClient, model: str, files: Sequence[bytes]) -> InferResult:
    """Run one inference on several files."""
    spec = await SpecCache(client).get(model)
    return await client.infer(spec, file_tensor(files), images=len(files), timeout_seconds=30)
