"""The lines of text in an image, as dialects describe them."""

from typing import Any, NamedTuple

import numpy as np

from app.api.sight.image import Asking, by_cascade
from app.cascade.catalog import BUILT_IN
from app.cascade.run import CascadeAnswer
from app.pipeline.results import TextLine, TextRegions

READING: Asking[Any, CascadeAnswer] = by_cascade(lambda worker, _: worker.catalog.get("ocr") or BUILT_IN["ocr"])
"""Asks for the text in an image."""


class Line(NamedTuple):
    """A line of text."""

    text: str
    score: float
    """That it is this text, 0 to 1."""
    box: tuple[float, float, float, float]
    """x1 y1 x2 y2, pixels of the upright image."""


def lines_of(found: CascadeAnswer) -> list[Line]:
    """Return the lines of text in reading order, without those in which no character was read.

    Raises:
        GatewayError: The lines were not found, or not read.
    """
    (regions,), text = found.require("lines").results, found.require("text")
    assert isinstance(regions, TextRegions)  # noqa: S101 - of a text detector
    boxes = np.concatenate([regions.corners.min(axis=1), regions.corners.max(axis=1)], axis=1).astype(np.float64).round(2).tolist()
    read = [(line, boxes[index]) for line, index in zip(text.results, text.objects, strict=True) if isinstance(line, TextLine)]
    return [Line(line.text, round(line.score, 4), tuple(box)) for line, box in read if line.text]
