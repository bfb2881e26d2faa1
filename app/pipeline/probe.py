"""Probe: an inference with a blank image that shows whether a Triton can run a model."""

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import InferenceFailed, InvalidModelOutput, ModelNotReady, UnknownModel
from app.model.spec import ModelSpec
from app.triton.client import TritonClient
from app.triton.messages import bytes_element_size, write_bytes_element
from app.triton.status import ModelFailed

# A PNG of one pixel.
BLANK_IMAGE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
_QUEUE_SECONDS = 5.0
_ASK_SECONDS = 1.0


def blank_input(spec: ModelSpec) -> NDArray[Any]:
    """Make an input tensor for one image: zeros, of the smallest usual size, or a PNG if the model takes encoded files."""
    return file_input(BLANK_IMAGE) if spec.dtype is None else np.zeros(spec.shape_of(smallest_size(spec)), spec.dtype)


def smallest_size(spec: ModelSpec) -> tuple[int, int]:
    """Return width and height of the smallest usual input."""
    return {"text": (spec.min_side, spec.min_side), "line": (spec.widths[0], spec.input_size[1])}.get(spec.resize, spec.input_size)


def file_input(data: bytes) -> NDArray[np.uint8]:
    """Make the input tensor of one encoded image, or of a text in UTF-8."""
    tensor = np.empty(bytes_element_size(data), np.uint8)
    write_bytes_element(data, tensor)
    return tensor


async def run_probe(client: TritonClient, spec: ModelSpec) -> bool:
    """Run one inference with a blank image as soon as Triton can be reached; return False if the model failed."""
    call = client.infer(spec, [blank_input(spec)], timeout_seconds=_QUEUE_SECONDS, request_id="probe", waits_for_connection=True)
    task = asyncio.ensure_future(call)
    try:
        # A lost connection is only noticed when something is sent.
        while not (await asyncio.wait({task}, timeout=_ASK_SECONDS))[0]:
            await client.is_ready(spec.reference)
        task.result()
    except ModelFailed:
        return False
    except (InferenceFailed, InvalidModelOutput, ModelNotReady, UnknownModel):
        pass  # Triton works
    finally:
        task.cancel()
    return True
