"""Decode the outputs of models that detect or read text.

Readers answer by CTC: each character may be repeated, and class 0 separates equal ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidModelOutput
from app.model.outputs import MAX_PROBABILITY, expect_shape, take_outputs
from app.model.spec import ModelSpec


def decode_map(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Decode the output tensor for one image to UINT8 (height, width): of 255, how probably each pixel belongs to text."""
    (found,) = take_outputs(spec, outputs)
    expect_shape(spec, found, (None, None))
    if found.dtype == np.uint8:
        return found
    if not (found.size and found.min() >= 0 and found.max() <= MAX_PROBABILITY):
        raise InvalidModelOutput(f"{spec.name} returned probabilities outside 0 to 1")
    scaled: NDArray[np.uint8] = np.rint(np.minimum(found, 1) * 255).astype(np.uint8)
    return scaled


class TextSteps(NamedTuple):
    """What is most likely at each step of a line, from left to right."""

    classes: NDArray[np.integer[Any]]
    """(steps,): 0 for none, otherwise a character."""
    scores: NDArray[np.float32]
    """(steps,) 0 to 1."""


def decode_steps(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> TextSteps:
    """Decode the output tensors for one line, given by name; a batch dimension must be 1."""
    classes, scores = take_outputs(spec, outputs)
    expect_shape(spec, classes, (None,))
    expect_shape(spec, scores, classes.shape)
    if classes.size and not (classes.min() >= 0 and classes.max() < len(spec.labels)):
        raise InvalidModelOutput(f"{spec.name} returned classes that have no label")
    if scores.size and not (scores.min() >= 0 and scores.max() <= MAX_PROBABILITY):
        raise InvalidModelOutput(f"{spec.name} returned scores outside 0 to 1")
    return TextSteps(classes, np.minimum(scores.astype(np.float32), 1))


def read_text(steps: TextSteps, labels: Sequence[str]) -> tuple[str, float]:
    """Return the text of a line, and the mean score of its characters, 0 without any.

    Source: Graves et al., Connectionist Temporal Classification, 2006 (best path decoding).
    """
    classes = steps.classes
    is_new = np.append(True, classes[1:] != classes[:-1]) if len(classes) else np.empty(0, bool)
    chosen = np.flatnonzero(is_new & (classes != 0))
    text = "".join(labels[index] for index in classes[chosen].tolist())
    return text, float(steps.scores[chosen].mean()) if len(chosen) else 0.0
