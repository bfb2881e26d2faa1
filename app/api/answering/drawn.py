"""The image with the detections drawn on it: alone, or beside them in JSON."""

from collections.abc import Callable, Sequence

import msgspec

from app.api.answering.format import Format, ResponseInput, best
from app.api.answering.native import to_response
from app.api.answering.responses import LargeResponse
from app.api.answering.schema import DetectResponse
from app.pipeline.call import CallContext
from app.pipeline.draw import PictureType, draw
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.resilience.lease import Lease

_TYPES: tuple[PictureType, ...] = "image/jpeg", "image/png"


async def _respond_image(given: ResponseInput[Detections]) -> LargeResponse:
    kind = picture_type(given)
    picture = await draw(given.pipeline, given.image, given.found, kind, given.call)
    return LargeResponse(picture, kind, given.pipeline.admission.memory)


async def _respond_image_and_json(given: ResponseInput[Detections]) -> LargeResponse:
    def describe(pictures: list[bytes]) -> DetectResponse:
        context = given.context
        response = to_response(given.found, given.wanted.boxes, context.timing.total, context.request_id)
        return msgspec.structs.replace(response, visualization=pictures[0])

    return await respond_with_pictures(given.pipeline, given.call, [(given.image, given.found)], describe, picture_type(given))


async def respond_with_pictures(
    pipeline: Pipeline,
    call: CallContext,
    images: Sequence[tuple[bytes, Detections]],
    describe: Callable[[list[bytes]], object],
    picture_type: PictureType = "image/jpeg",
) -> LargeResponse:
    """Respond with JSON that contains a picture of each encoded image with its detections, in base64.

    `describe` takes the encoded pictures and returns the object to encode as JSON. Errors are those of `draw`.
    """
    lease, memory = Lease(), pipeline.admission.memory.reserve(call.caller)
    pictures: list[bytes] = []
    with lease:
        lease.on_release(memory.release)
        memory.add(sum(len(image) for image, _ in images))
        for image, found in images:
            pictures.append(await draw(pipeline, image, found, picture_type, call))
            memory.add(3 * len(pictures[-1]))  # the picture and its base64 text
        body = await pipeline.threads.run(lambda: msgspec.json.encode(describe(pictures)), call.deadline, lease, turn=call.turn())
    return LargeResponse(body, "application/json", pipeline.admission.memory)


def picture_type(given: ResponseInput[Detections]) -> PictureType:
    """Return the type that the caller prefers; the first one if `Accept` allows neither but `format` selected a picture."""
    return "image/png" if best(given.context.accept, _TYPES) == "image/png" else "image/jpeg"


IMAGE = Format("image", _TYPES, _respond_image)
IMAGE_AND_JSON = Format("image_and_json", (), _respond_image_and_json)
