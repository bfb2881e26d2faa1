"""The pictures of a route on which the answers of two models differ most, if its operator keeps them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

from app.imaging.header import PixelLimits, read_header
from app.imaging.picture import draw_picture, estimate_picture_bytes
from app.pipeline.results import TaskResult
from app.routing.comparison import boxes_of
from app.telemetry.metrics import ANSWERS

MAX_FILES = 2 * 10


def keep_picture(  # noqa: PLR0913, PLR0917 - a picture, and where it is kept
    folder: Path, name: str, data: bytes, answers: Iterable[TaskResult], limits: PixelLimits, reserve: Callable[[int], None]
) -> None:
    """Draw each of two answers on an encoded image, and keep the JPEGs among the pairs of its route on which they differ most.

    The name is that of the route, a blank and the agreement, 0.0000 to 1.0000. All workers share the folder. `reserve` gets the
    memory that drawing takes, in bytes.

    Raises:
        OSError: The folder cannot be read or written.
        GatewayError: There is not enough memory, or the image cannot be decoded.
    """

    def kept() -> list[Path]:  # the ones with the highest agreement are the last
        return sorted(path for path in folder.glob("*.jpg") if path.name.startswith(f"{name.partition(' ')[0]} "))

    before = kept()
    if name.endswith("1.0000") or (len(before) >= MAX_FILES and name >= before[-1].name[: len(name)]):
        return
    stem = f"{name} {uuid4()}"
    for answer, found in zip(ANSWERS, answers, strict=True):
        header = read_header(data, limits, reserve)
        reserve(estimate_picture_bytes(header))
        unfinished = folder / f"{stem} {answer}.part"
        try:
            unfinished.touch(0o600)
            unfinished.write_bytes(draw_picture(header, boxes_of(found), "image/jpeg"))
            unfinished.rename(unfinished.with_suffix(".jpg"))
        finally:
            unfinished.unlink(missing_ok=True)
    for path in kept()[MAX_FILES:]:
        path.unlink(missing_ok=True)
