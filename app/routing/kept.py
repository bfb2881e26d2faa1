"""The pictures of a route on which the answers of two models differ most, if its operator keeps them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

from app.imaging.drawing import Marks
from app.imaging.header import PixelLimits, read_header
from app.imaging.picture import draw_side_by_side, estimate_picture_bytes
from app.pipeline.call import TaskResult
from app.routing.comparison import boxes_of

MAX_PICTURES = 10


def keep_picture(  # noqa: PLR0913, PLR0917 - a picture, and where it is kept
    folder: Path, name: str, data: bytes, answers: Iterable[TaskResult], limits: PixelLimits, reserve: Callable[[int], None]
) -> None:
    """Draw answers side by side on an encoded image, and keep the JPEG among the ten of its route on which they differ most.

    The name is that of the route, a blank and the agreement, 0.0000 to 1.0000. All workers share the folder. `reserve` gets the
    memory that drawing takes, in bytes.

    Raises:
        OSError: The folder cannot be read or written.
        GatewayError: There is not enough memory, or the image cannot be decoded.
    """

    def kept() -> list[str]:  # the one with the highest agreement is the last
        return sorted(path.name for path in folder.glob("*.jpg") if path.name.startswith(f"{name.partition(' ')[0]} "))

    before = kept()
    if name.endswith("1.0000") or (len(before) >= MAX_PICTURES and name >= before[-1][: len(name)]):
        return
    header = read_header(data, limits, reserve)
    reserve(2 * estimate_picture_bytes(header))
    picture = draw_side_by_side(header, *map(_marks, answers))
    path = folder / f"{name} {uuid4()}.part"
    try:
        path.touch(0o600, exist_ok=False)
        path.write_bytes(picture)
        path.rename(path.with_suffix(".jpg"))
    finally:
        path.unlink(missing_ok=True)
    for other in kept()[MAX_PICTURES:]:
        (folder / other).unlink(missing_ok=True)


def _marks(found: TaskResult) -> Marks:
    boxes, scores, labels = boxes_of(found)
    return Marks(boxes, scores, found.class_ids[: len(boxes)], labels.tolist())
