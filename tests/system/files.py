"""Requests of several encoded files, as the gateway sends them to a model that decodes by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.triton.client import TritonClient


def file_tensor(files: Sequence[bytes]) -> NDArray[np.uint8]:
    """Write files one behind the other, as elements of a BYTES tensor."""
    return np.frombuffer(b"".join(len(file).to_bytes(4, "little") + file for file in files), np.uint8)


async def infer_files(client: TritonClient, spec: ModelSpec, files: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Run one inference on several files; returns the outputs by name."""
    answer = await client.infer(spec, file_tensor(files), images=len(files), timeout_seconds=30)
    return answer.outputs
