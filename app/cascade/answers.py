"""Read what the cascades `embedding`, `faces` and `ocr` have answered."""

import math

import numpy as np
from numpy.typing import NDArray

from app.cascade.run import CascadeAnswer
from app.errors import UnsupportedModel, WrongTask
from app.pipeline.results import Detections, Embedding, StepResult, TextLine, TextRegions

MIN_TEXT_SCORE = 0.8
_LANDMARKS = 5
_FRACTION_DIGITS = 6


def expect_vector(found: StepResult) -> Embedding:
    """Return the result of an embedding model; raise WrongTask for that of another one."""
    if isinstance(found, Embedding):
        return found
    raise WrongTask(f"{found.spec.name} gives no vectors")


def expect_faces(found: StepResult) -> tuple[Detections, NDArray[np.float32]]:
    """Return faces, and their five landmarks (n, 5, 2) in pixels; raise UnsupportedModel if they have none."""
    if isinstance(found, Detections) and found.keypoints is not None and found.keypoints.shape[1] == _LANDMARKS:
        return found, found.keypoints[..., :2]
    raise UnsupportedModel(f"{found.spec.name} does not find the {_LANDMARKS} landmarks of a face")


def read_lines(found: CascadeAnswer, min_score: float | None = MIN_TEXT_SCORE) -> tuple[TextRegions, list[tuple[int, TextLine]]]:
    """Return the places that the cascade `ocr` has found, and the lines in reading order, each with the index of its place.

    Lines without text, or with a lower score, are left out; none with None. Raises the error of a step, or WrongTask.
    """
    (where,), read = found.require("lines").results, found.require("text")
    if not isinstance(where, TextRegions):
        raise WrongTask(f"{where.spec.name} finds no lines of text")
    lines: list[tuple[int, TextLine]] = []
    for index, line in zip(read.objects, read.results, strict=True):
        if not isinstance(line, TextLine):
            raise WrongTask(f"{line.spec.name} reads no lines of text")
        if min_score is None or (line.text and line.score >= min_score):
            lines.append((index, line))
    return where, lines


def to_fractions(points: NDArray[np.float32], width: int, height: int) -> list[list[float]]:
    """Return rows of x y x y ... in pixels, of any shape (n, ...), as rows of fractions of an image of this size."""
    rows = points.reshape(len(points), math.prod(points.shape[1:])).astype(np.float64)
    fractions: list[list[float]] = (rows / np.resize([width, height], rows.shape[1])).round(_FRACTION_DIGITS).tolist()
    return fractions
