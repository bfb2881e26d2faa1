"""Vectors as JSON."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.api.answering.format import Format, ResponseInput
from app.api.answering.native import ending_of, rounded
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import ResultOfModel
from app.pipeline.results import Embedding

# A vector of 1,280 numbers keeps its direction to within 1e-5.
_DIGITS = 7


class EmbedResponse(ResultOfModel, frozen=True):
    """The vector that describes an image."""

    embedding: list[float]
    """Of length 1. Its size is that of the model; only vectors of the same model can be compared."""
    embedding_norm: float
    """Length of the model's own vector."""
    image_id: str | None
    """That of the request."""
    indexed: bool
    """Whether it is in the index."""


def to_vector(vector: NDArray[np.float32]) -> list[float]:
    """Return a vector of length 1 as a list."""
    return rounded(vector, _DIGITS)


def to_norm(norm: float) -> float:
    """Return the length of a model's own vector, rounded."""
    return float(f"{norm:.6g}")


async def _respond(given: ResponseInput[Embedding]) -> JsonResponse:
    vector, norm = to_vector(given.found.vector), to_norm(given.found.norm)
    return JsonResponse(
        msgspec.json.encode(EmbedResponse(vector, norm, given.wanted.image_id, given.wanted.index, **ending_of(given)))
    )


JSON = Format("json", ("application/json",), _respond)
