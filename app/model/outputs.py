"""Output tensors of one image, checked against the model's spec."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidImage, InvalidModelOutput
from app.model.spec import DECODED, ModelSpec

MAX_PROBABILITY = 1.02
"""Up to which probabilities are clipped to 1: FP16 and INT8 round to slightly more."""


def take_outputs(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the tensors of a model's head without the batch dimension; raises InvalidImage if it could not decode the image."""
    if spec.tells_decoded and not _take(spec, DECODED, None, outputs).all():
        raise InvalidImage("the image data is truncated or corrupt")
    expected = zip(spec.output_names, spec.output_dtypes, strict=True)
    return [_take(spec, name, dtype, outputs) for name, dtype in expected]


def expect_shape(spec: ModelSpec, tensor: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    """Raise `InvalidModelOutput` for a tensor without this shape, in which None stands for any size."""
    if tensor.shape == shape:
        return
    if tensor.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)):
        raise InvalidModelOutput(f"{spec.name} returned a tensor of shape {tensor.shape}, expected {shape}")


def _take(spec: ModelSpec, name: str, dtype: np.dtype[Any] | None, outputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    tensor = outputs.get(name)
    if tensor is None:
        raise InvalidModelOutput(f"{spec.name} did not return {name}")
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidModelOutput(f"{spec.name} returned {name} as {tensor.dtype}, expected {dtype}")
    if not spec.has_batch_dimension:
        return tensor
    if tensor.ndim == 0 or len(tensor) != 1:
        raise InvalidModelOutput(f"{spec.name} returned {name} of shape {tensor.shape} for one image")
    return tensor.reshape(tensor.shape[1:])
