"""Draw detections on their image."""

from app.imaging.drawing import Marks
from app.imaging.header import count_pixels, read_header
from app.imaging.picture import PictureType, draw_picture, estimate_picture_bytes
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.resilience.lease import Lease
from app.telemetry.timing import DRAW

__all__ = ["PictureType", "draw"]

# Duration of drawing relative to decoding for a model, which the backlog measures.
_DECODINGS: dict[PictureType, int] = {"image/jpeg": 2, "image/png": 8}


async def draw(pipeline: Pipeline, data: bytes, found: Detections, picture_type: PictureType, call: CallContext) -> bytes:
    """Draw what was found on the upright image, at its full size and without a permit; return the encoded picture."""
    call.timing.begin(DRAW)
    admission, limits = pipeline.admission, pipeline.limits.pixels
    labels = found.spec.labels
    names = found.titles or [labels[id_] if id_ < len(labels) else "" for id_ in found.class_ids.tolist()]
    masks = None if found.masks is None else [mask.parts for mask in found.masks]
    marks = Marks(found.boxes, found.scores, found.class_ids, names, masks, found.keypoints, found.corners)

    def work() -> bytes:
        with admission.memory.reserve(call.caller) as memory:
            header = read_header(data, limits, memory.add)
            memory.add(estimate_picture_bytes(header))
            return draw_picture(header, marks, picture_type)

    pixels = count_pixels(data, limits) * _DECODINGS[picture_type]
    with admission.decode_backlog.add(pixels, call.deadline, call.caller) as counted, Lease() as lease:
        encoded = admission.memory.reserve(call.caller)
        lease.on_release(encoded.release)
        encoded.add(len(data))
        picture = await pipeline.threads.run(work, call.deadline, counted, lease, turn=call.turn(pixels))
    call.timing.lap(DRAW)
    return picture
