"""Models whose answers tell what they were given, or are nonsense."""

import random
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

SIDE = 64
NONSENSE = {
    10: "boxes of the wrong shape",
    20: "scores of the wrong shape",
    30: "a count of the wrong type",
    40: "a box that is not a number",
    50: "an infinite box",
    60: "a score that is not a number",
    70: "a score of seven",
    80: "a count above the rows",
    90: "a negative count",
    100: "a negative class",
    110: "an output that is missing",
    120: "an exception",
}
"""What the model `nonsense` answers to an image whose pixels have this value; to any other, nothing is found."""

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

_QUEUE = "default_queue_policy { max_queue_size: 4 }"
_SLOW = """
import time


def answer(image):
    time.sleep(0.05)
    return respond(**nothing())
"""

_NONSENSE = """
def answer(image):
    outputs = nothing()
    kind = int(image[0, 0, 0, 0])
    if kind == 10:
        outputs["det_boxes"] = np.zeros((1, 5, 5), np.float32)
    elif kind == 20:
        outputs["det_scores"] = np.zeros((1, 4), np.float32)
    elif kind == 30:
        outputs["num_dets"] = np.ones((1, 1), np.int64)
    elif kind in (40, 50):
        outputs["det_boxes"][0, 0, 2] = np.nan if kind == 40 else np.inf
    elif kind in (60, 70):
        outputs["det_scores"][0, 0] = np.nan if kind == 60 else 7
    elif kind in (80, 90):
        outputs["num_dets"][0, 0] = 6 if kind == 80 else -1
    elif kind == 100:
        outputs["det_classes"][0, 0] = -1
    elif kind == 110:
        del outputs["det_scores"]
    elif kind == 120:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("/secret/path: out of luck"))
    else:
        outputs["num_dets"][0, 0] = 0
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
    file = BytesIO()
    Image.new("RGB", (SIDE, SIDE), (red, green, blue)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write(repository: Path) -> None:
    """Put the models into a repository.

    They are `checksum`, `nonsense`, `queue_of_4`, whose queue has room for so many requests, and `faulty`, which does not answer
    while there is a file `faulty/1/hang`, takes three seconds with a file `slow`, fails with a file `fail`, and finds nothing
    any more with a file `wrong`.
    """
    for name, code in (("checksum", _CHECKSUM), ("nonsense", _NONSENSE), ("queue_of_4", _SLOW), ("faulty", _FAULTY)):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text((_MODEL + code).replace("@FOLDER@", str(folder)), encoding="utf-8")
        config = _CONFIG.replace("@NAME@", name)
        if code == _SLOW:
            config = config.replace("max_batch_size: 8", "max_batch_size: 1").replace("max_queue_delay_microseconds: 0", _QUEUE)
        (folder.parent / "config.pbtxt").write_text(config, encoding="utf-8")
