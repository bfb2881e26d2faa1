"""Classifications as the gateway's own JSON."""

import msgspec
import numpy as np

from app.api.formats.answer import Answer, Format
from app.api.json_response import JsonResponse
from app.api.schema import Classification, ClassifyResponse, ImageSize, ModelUsed
from app.pipeline.call import Classifications

_SCORE_DIGITS = 4


def to_response(found: Classifications, total_time_ms: float, request_id: str) -> ClassifyResponse:
    """Describe the result of one request. A class id without a label is its own name."""
    labels = found.spec.labels
    classifications = [
        Classification(
            class_=id_,
            class_id=id_,
            class_name=labels[id_] if id_ < len(labels) else str(id_),
            confidence=round(score, _SCORE_DIGITS),
        )
        for id_, score in zip(found.class_ids.tolist(), found.scores.astype(np.float64).tolist(), strict=True)
    ]
    return ClassifyResponse(
        classifications=classifications,
        num_classifications=len(classifications),
        status="success",
        image=ImageSize(found.width, found.height),
        model=ModelUsed(found.spec.name, found.version, "triton", found.spec.device),
        total_time_ms=round(total_time_ms, 2),
        request_id=request_id,
    )


async def _respond(answer: Answer[Classifications]) -> JsonResponse:
    context = answer.context
    return JsonResponse(msgspec.json.encode(to_response(answer.found, context.timing.total, context.request_id)))


JSON = Format("json", ("application/json",), _respond)
