"""Models whose answers tell what they were given, or are nonsense."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tests.imaging.samples import encode

SIDE = 64
_CONFIG = f"""
name: "@NAME@"
backend: "python"
max_batch_size: 8
input {{ name: "image" data_type: TYPE_UINT8 dims: [ {SIDE}, {SIDE}, 3 ] }}
output {{ name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "det_boxes" data_type: TYPE_FP32 dims: [ 5, 4 ] }}
output {{ name: "det_scores" data_type: TYPE_FP32 dims: [ 5 ] }}
output {{ name: "det_classes" data_type: TYPE_INT32 dims: [ 5 ] }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
parameters {{ key: "placement" value {{ string_value: "center" }} }}
parameters {{ key: "labels" value {{ string_value: "checksum" }} }}
parameters {{ key: "box_units" value {{ string_value: "pixels" }} }}
"""

_MODEL = """
import ctypes

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [answer(np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "image"))) for request in requests]


def respond(**outputs):
    return pb_utils.InferenceResponse([tensor(name, array) for name, array in outputs.items()])


# Triton 2.51's own conversion returns empty tensors under numpy 2; DLPack works, but for the name of a used capsule.
def tensor(name, array):
    capsule = np.ascontiguousarray(array).__dlpack__()
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)


def nothing():
    return {
        "num_dets": np.ones((1, 1), np.int32),
        "det_boxes": np.zeros((1, 5, 4), np.float32),
        "det_scores": np.full((1, 5), 0.9, np.float32),
        "det_classes": np.zeros((1, 5), np.int32),
    }

"""

_CHECKSUM = """
def answer(image):
    red, green, blue = image.mean((0, 1, 2))
    outputs = nothing()
    outputs["det_boxes"][0, 0] = red / 8, green / 8, 32 + blue / 8, 63
    return respond(**outputs)
"""

_FAULTY = """
import os
import time


def answer(image):
    while os.path.exists("@FOLDER@/hang"):
        time.sleep(0.05)
    if os.path.exists("@FOLDER@/slow"):
        time.sleep(3)
    if os.path.exists("@FOLDER@/wrong"):
        return respond(**{name: 0 * tensor for name, tensor in nothing().items()})
    if os.path.exists("@FOLDER@/fail"):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("CUDA error: an illegal memory access was encountered"))
    return respond(**nothing())
"""


class Checksum(NamedTuple):
    """An image, and the box that the model `checksum` finds in it: the mean of its channels."""

    image: bytes
    box: tuple[float, float, float, float]
    """x1 y1 x2 y2, pixels."""

    @classmethod
    def draw(cls, source: random.Random) -> "Checksum":
        red, green, blue = (source.randrange(256) for _ in range(3))
        return cls(solid(red, green, blue), (red / 8, green / 8, 32 + blue / 8, 63.0))

    def is_box(self, found: dict[str, float]) -> bool:
        return all(abs(found[name] - value) < 0.02 for name, value in zip(("x1", "y1", "x2", "y2"), self.box, strict=True))


def solid(red: int, green: int, blue: int) -> bytes:
    """Encode an image of one colour, which a decoder does not change."""
    return encode(Image.new("RGB", (SIDE, SIDE), (red, green, blue)), "PNG", compress_level=1)


@asynccontextmanager
async def faulty(repository: Path, how: str) -> AsyncIterator[None]:
    file = repository / "faulty" / "1" / how
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def write(repository: Path) -> None:
    """Put the models into a repository.

    They are `checksum` and `faulty`, which does not answer while there is a file `faulty/1/hang`, takes three seconds with a file
    `slow`, fails with a file `fail`, and finds nothing any more with a file `wrong`; `faulty` makes them.
    """
    for name, code in (("checksum", _CHECKSUM), ("faulty", _FAULTY)):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text((_MODEL + code).replace("@FOLDER@", str(folder)), encoding="utf-8")
        (folder.parent / "config.pbtxt").write_text(_CONFIG.replace("@NAME@", name), encoding="utf-8")
