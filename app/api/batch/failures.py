"""Errors of images whose request cannot be answered in part."""

from collections.abc import Mapping
from copy import copy

from app.errors import GatewayError


def keep(error: Exception) -> Exception:
    """Copy an error that is to be raised later: its traceback would refer to the image. An unexpected one has been logged."""
    return copy(error) if isinstance(error, GatewayError) else RuntimeError("an image of a batch failed")


def first_of(errors: Mapping[int, Exception], images: int) -> Exception:
    """Return the error of the first image that failed, by index; of several images, it says which one."""
    index, error = min(errors.items())
    if isinstance(error, GatewayError) and images > 1:
        error.detail = f"{len(errors)} of {images} images failed; at index {index}: {error.detail}"
    return error
