"""Classifications as the gateway's own JSON."""

import msgspec

from app.api.formats.answer import Answer, Format
from app.api.formats.native import to_scores
from app.api.json_response import JsonResponse
from app.api.schema import Classification, ClassifyResponse, ImageSize, ModelUsed
from app.pipeline.call import Classifications


def to_response(found: Classifications, total_time_ms: float, request_id: str) -> ClassifyResponse:
    """Describe the result of one request."""
    classifications = [
        Classification(class_=id_, class_id=id_, class_name=found.spec.class_name(id_), confidence=score)
        for id_, score in zip(found.class_ids.tolist(), to_scores(found.scores), strict=True)
    ]
    return ClassifyResponse(
        classifications=classifications,
        num_classifications=len(classifications),
        status="success",
        image=ImageSize(found.width, found.height),
        model=ModelUsed.of(found),
        total_time_ms=round(total_time_ms, 2),
        request_id=request_id,
    )


async def _respond(answer: Answer[Classifications]) -> JsonResponse:
    context = answer.context
    return JsonResponse(msgspec.json.encode(to_response(answer.found, context.timing.total, context.request_id)))


JSON = Format("json", ("application/json",), _respond)
