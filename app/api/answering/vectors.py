"""Vectors as JSON."""

from typing import Literal

import msgspec

from app.api.answering.format import Format, ResponseInput
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import ImageSize, ModelUsed
from app.pipeline.results import Embedding

# The resolution of FP32 for numbers around 0.1.
_DIGITS = 8


class EmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The vector that describes an image."""

    embedding: list[float]
    """Of length 1. Its size is that of the model; only vectors of the same model can be compared."""
    embedding_norm: float
    """Length of the model's own vector."""
    indexed: Literal[False] = False
    """Constant: the gateway keeps no vectors."""
    image_id: str | None
    """That of the request."""
    status: Literal["success"] = "success"
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str


def to_numbers(found: Embedding) -> list[float]:
    """Return the values of a vector."""
    numbers: list[float] = found.vector.astype(float).round(_DIGITS).tolist()
    return numbers


async def _respond(given: ResponseInput[Embedding]) -> JsonResponse:
    response = EmbedResponse(
        embedding=to_numbers(given.found),
        embedding_norm=round(given.found.norm, 6),
        image_id=given.wanted.image_id,
        image=ImageSize(given.found.width, given.found.height),
        model=ModelUsed.of(given.found),
        total_time_ms=round(given.context.timing.total, 2),
        request_id=given.context.request_id,
    )
    return JsonResponse(msgspec.json.encode(response))


JSON = Format("json", ("application/json",), _respond)
