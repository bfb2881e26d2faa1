"""The image with boxes, names and scores drawn on it: alone, or beside the detections in JSON."""

from functools import partial

import msgspec

from app.api.formats.accept import best
from app.api.formats.answer import Answer, Format
from app.api.formats.native import to_response
from app.api.large_response import LargeResponse
from app.pipeline.call import Detections
from app.pipeline.draw import PictureType, draw
from app.resilience.lease import Lease

_TYPES: tuple[PictureType, ...] = "image/jpeg", "image/png"


async def _respond_image(answer: Answer[Detections]) -> LargeResponse:
    picture_type = _picture_type(answer)
    return LargeResponse(await _draw(answer, picture_type), picture_type, answer.pipeline.admission.memory)


async def _respond_image_and_json(answer: Answer[Detections]) -> LargeResponse:
    picture = await _draw(answer, _picture_type(answer))
    context, memory = answer.context, answer.pipeline.admission.memory
    response = to_response(answer.found, answer.presentation.boxes, context.timing.total, context.request_id)
    encode = partial(msgspec.json.encode, msgspec.structs.replace(response, visualization=picture))
    lease, encoded = Lease(), memory.reserve()
    with lease:
        lease.on_release(encoded.release)
        encoded.add(3 * len(picture))  # itself, and in base64
        body = await answer.pipeline.run_in_thread(encode, answer.call.deadline, lease)
    return LargeResponse(body, "application/json", memory)


async def _draw(answer: Answer[Detections], picture_type: PictureType) -> bytes:
    return await draw(answer.pipeline, answer.image, answer.found, picture_type, answer.call)


def _picture_type(answer: Answer[Detections]) -> PictureType:
    """Return the type that the caller likes best; that of the first, if it accepts neither, but has named the format."""
    chosen = best(answer.context.accept, _TYPES)
    return next((picture_type for picture_type in _TYPES if picture_type == chosen), _TYPES[0])


IMAGE = Format("image", _TYPES, _respond_image)
IMAGE_AND_JSON = Format("image_and_json", (), _respond_image_and_json)
