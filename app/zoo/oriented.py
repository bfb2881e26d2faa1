"""Suppression of oriented boxes by their probabilistic IoU in standard operators, as Ultralytics suppresses them.

A box is a normal distribution. It falls if any better one of its class, also one that falls itself, is as near as the IoU says.
"""

from math import log1p

import numpy as np
from onnx import TensorProto

from app.zoo.graph import DOUBLE, FP32, Value
from app.zoo.recipe import ObbRecipe

_EPSILON = 1e-7


def suppress_oriented(geometry: Value, score: Value, label: Value, recipe: ObbRecipe, limit: int) -> Value:
    """Return the scores (batch, n) of the best candidates, at least `limit` of them, those of suppressed boxes as zero."""
    # The geometry (batch, 5, candidates) is the centre, the size and the angle of each, by descending score.
    floor, epsilon = recipe.floor, np.float64(_EPSILON)
    # As many candidates are compared as are above the floor in one of the images, but enough for the last TopK. In DOUBLE, because
    # TensorRT would compute FP32 as FP16, which cannot hold products of areas.
    counts = (score > floor).op("Cast", to=TensorProto.INT64).op("ReduceSum", [1], keepdims=0)
    reach = counts.op("ReduceMax", axes=[0], keepdims=1).op("Max", [limit])
    centre, size, angle = geometry.op("Slice", [0], reach, [2]).split(2, 2, 1)
    size = size.op("Cast", to=DOUBLE)
    along, across = (size * size / np.float64(12)).split(1, 1)
    cos, sin = angle.op("Cos"), angle.op("Sin")
    turn = cos.op("Concat", sin, cos, axis=1) * cos.op("Concat", sin, sin, axis=1)
    covariance = across * np.array([[[1.0], [1.0], [0.0]]]) + (along - across) * turn.op("Cast", to=DOUBLE)
    width, height = size.split(1, 1)

    xx, yy, xy = _combine("Add", covariance, 3).split(1, 1, 1)
    dx, dy = _combine("Sub", centre.op("Cast", to=DOUBLE), 3).split(1, 1)
    roots = _combine("Mul", width * height / np.float64(6), 3)
    determinant = xx * yy - xy * xy
    crossed = xy * (dx * dy)
    far = (xx * (dy * dy) + yy * (dx * dx) - crossed - crossed) / (determinant + epsilon)
    unlike = (determinant / (roots + epsilon) + epsilon).op("Log")
    is_near = (far + unlike + unlike).op("LessOrEqual", np.float64(4 * _max_distance(recipe.iou))).op("Squeeze", [1])

    is_same = _combine("Equal", label.op("Slice", [0], reach, [1]), 2)
    is_better_near = (is_near & is_same).op("Trilu", 1, upper=1)
    fall = is_better_near.op("Cast", to=FP32).op("ReduceMax", axes=[1], keepdims=0)
    near_score = score.op("Slice", [0], reach, [1])
    return near_score.op("Greater", fall.op("Max", floor)).op("Where", near_score, 0.0)


def _combine(operator: str, value: Value, axis: int) -> Value:
    return value.op("Unsqueeze", [axis]).op(operator, value.op("Unsqueeze", [axis - 1]))


def _max_distance(iou: float) -> float:
    # Bhattacharyya distance of an IoU: 1 - sqrt(1 - exp(-distance) + epsilon); no two boxes have an IoU of 1.
    distance = -log1p(_EPSILON - (1 - iou) ** 2) if iou > 0 else 100.0
    return distance if distance >= _EPSILON else -100.0
