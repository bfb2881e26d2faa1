"""Draw what was found on the image it was found in."""

from app.imaging.drawing import Marks
from app.imaging.header import count_pixels, read_header
from app.imaging.picture import PictureType, draw_picture, estimate_picture_bytes
from app.pipeline.call import CallContext, Detections
from app.pipeline.pipeline import Pipeline
from app.telemetry.timing import DRAW

__all__ = ["PictureType", "draw"]

# How many times as long a picture takes as what the backlog measures: decoding a JPEG at the size that a model needs.
_DECODINGS: dict[PictureType, int] = {"image/jpeg": 2, "image/png": 8}


async def draw(pipeline: Pipeline, data: bytes, found: Detections, picture_type: PictureType, call: CallContext) -> bytes:
    """Draw boxes, names and scores on the upright image, at its full size.

    The permit for the model has been given back: what bounds the pictures that are drawn are the memory for images, the
    threads that decode, and the deadline.

    Args:
        pipeline: What has found them.
        data: The encoded image.
        found: What was found in it.
        picture_type: Of the result.
        call: What goes with the request; gets the lap `draw`.

    Returns:
        The encoded picture.

    Raises:
        GatewayError: The image cannot be decoded, there is no room to draw it now, or the deadline has passed.
    """
    call.timing.begin(DRAW)
    admission, limits = pipeline.admission, pipeline.limits.pixels
    labels = found.spec.labels
    names = [labels[id_] if id_ < len(labels) else "" for id_ in found.class_ids.tolist()]
    marks = Marks(found.boxes, found.scores, found.class_ids, names)

    def work() -> bytes:
        header = read_header(data, limits)
        with admission.memory.reserve() as memory:
            memory.add(estimate_picture_bytes(header))
            return draw_picture(header, marks, picture_type)

    pixels = count_pixels(data, limits) * _DECODINGS[picture_type]
    with admission.decode_backlog.add(pixels, call.deadline) as counted:
        encoded = admission.memory.reserve()
        counted.on_release(encoded.release)
        encoded.add(len(data))
        picture = await pipeline.run_in_thread(work, call.deadline, counted)
    call.timing.lap(DRAW)
    return picture
