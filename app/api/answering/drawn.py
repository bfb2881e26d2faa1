"""The image with the detections drawn on it: alone, or beside them in JSON."""

from collections.abc import Callable, Sequence

import msgspec

from app.api.answering.format import Format, ResponseInput, best
from app.api.answering.native import describe
from app.api.answering.responses import LargeResponse
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
    images, kind = [(given.image, given.found)], picture_type(given)
    return await respond_with_pictures(given.pipeline, given.call, images, lambda pictures: describe(given, *pictures), kind)


async def respond_with_pictures(
    pipeline: Pipeline,
    call: CallContext,
    images: Sequence[tuple[bytes, Detections]],
    to_content: Callable[[list[bytes]], object],
    picture_type: PictureType = "image/jpeg",
) -> LargeResponse:
    """Respond with JSON that `to_content` makes of the encoded pictures: each image with its detections, in base64."""
    lease, memory = Lease(), pipeline.admission.memory.reserve(call.caller)
    pictures: list[bytes] = []
    with lease:
        lease.on_release(memory.release)
        memory.add(sum(len(image) for image, _ in images))
        for image, found in images:
            pictures.append(await draw(pipeline, image, found, picture_type, call))
            memory.add(3 * len(pictures[-1]))  # the picture and its base64 text
        body = await pipeline.threads.run(lambda: msgspec.json.encode(to_content(pictures)), call.deadline, lease, turn=call.turn())
    return LargeResponse(body, "application/json", pipeline.admission.memory)


def picture_type(given: ResponseInput[Detections]) -> PictureType:
    """Return the type that the caller prefers; the first one if `Accept` allows neither but `format` selected a picture."""
    return "image/png" if best(given.context.accept, _TYPES) == "image/png" else "image/jpeg"


IMAGE = Format("image", _TYPES, _respond_image)
IMAGE_AND_JSON = Format("image_and_json", (), _respond_image_and_json)
