"""The pictures of a route on which the answers of two models differ most, if its operator keeps them."""

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from app.imaging.drawing import Marks
from app.imaging.header import ImageHeader
from app.imaging.picture import draw_side_by_side, estimate_picture_bytes
from app.pipeline.call import TaskResult
from app.routing.comparison import boxes_of

MAX_PICTURES = 10


class KeptPictures:
    """At most ten JPEG files of a route in a folder, which all workers share.

    Their names begin with the agreement of the answers, after that of the route.
    """

    def __init__(self, folder: Path, route: str) -> None:
        self._folder = folder
        self._route = route

    def offer(self, agreement: float, draw: Callable[[], bytes]) -> None:
        """Keep a picture, which `draw` makes, if the answers differ more than those on one of the others.

        Raises:
            OSError: The folder cannot be read or written.
        """
        name = f"{self._route} {agreement:.4f}"
        kept = self._files()
        if agreement == 1 or (len(kept) >= MAX_PICTURES and name >= kept[-1].name[: len(name)]):
            return
        path = self._folder / f"{name} {uuid4()}.jpg"
        picture = draw()
        unfinished = path.with_suffix(".part")
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(picture)
        unfinished.rename(path)
        for other in self._files()[MAX_PICTURES:]:
            other.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Return the kept files; the one with the highest agreement is the last."""
        return sorted(path for path in self._folder.iterdir() if path.name.startswith(f"{self._route} ") and path.suffix == ".jpg")


def draw_answers(header: ImageHeader, first: TaskResult, second: TaskResult, reserve: Callable[[int], None]) -> bytes:
    """Draw two answers on an image, side by side, and return the JPEG; `reserve` gets the memory for that, in bytes.

    Raises:
        GatewayError: There is not enough memory, or the image cannot be decoded.
    """
    reserve(2 * estimate_picture_bytes(header))
    return draw_side_by_side(header, *map(_marks, (first, second)))


def _marks(found: TaskResult) -> Marks:
    boxes, scores, labels = boxes_of(found)
    return Marks(boxes, scores, found.class_ids[: len(boxes)], labels.tolist())
