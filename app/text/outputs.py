"""Decode the output of a text detector."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidModelOutput
from app.model.outputs import expect_shape, take_outputs
from app.model.spec import ModelSpec


def decode_map(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Decode the output tensor for one image, given by name; a batch dimension must be 1.

    Returns:
        UINT8 (height, width): for each pixel of the input the probability that it belongs to text, of 255.

    Raises:
        InvalidModelOutput: The tensor is missing, has the wrong shape or type, or values outside 0 to 1.
    """
    (found,) = take_outputs(spec, outputs)
    expect_shape(spec, found, (None, None))
    if found.dtype == np.uint8:
        return found
    if not (found.size and found.min() >= 0 and found.max() <= 1):
        raise InvalidModelOutput(f"{spec.name} returned probabilities outside 0 to 1")
    scaled: NDArray[np.uint8] = np.rint(found * 255).astype(np.uint8)
    return scaled
