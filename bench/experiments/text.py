"""Text in pictures of rendered lines: the gateway beside RapidOCR, of whose models it makes its own."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import cv2
import numpy as np

from app.settings import environment
from bench.experiments.options import Commands
from bench.experiments.progress import say
from bench.harness.environments import RAPIDOCR
from bench.harness.errors import ContestantError
from bench.harness.reading import ReadLine, Steps, read_by_request, read_with_rapidocr
from bench.load.text_pictures import PACKAGES, TextPicture, text_pictures
from bench.report.text import table

MAX_ERROR_DIFFERENCE = 0.002
"""By how much the gateway's character error rate may be above RapidOCR's."""
MIN_IOU = 0.95
"""Minimum of the intersection over union of each of RapidOCR's boxes with one of the gateway's."""
# RapidOCR's `text_score`, below which it drops a line.
_MIN_SCORE = 0.5


class Row(NamedTuple):
    """The results on pictures of one kind."""

    kind: str
    lines: int
    characters: int
    errors: int
    """Of the gateway: characters to insert, delete or replace."""
    reference_errors: int
    ious: list[float]
    """For each of RapidOCR's boxes, the best intersection over union with the gateway's."""
    surplus: int
    """Number of the gateway's boxes that are not one of RapidOCR's."""

    def plus(self, other: "Row") -> "Row":
        """Return the results on the pictures of both."""
        return Row(
            self.kind,
            self.lines + other.lines,
            self.characters + other.characters,
            self.errors + other.errors,
            self.reference_errors + other.reference_errors,
            self.ious + other.ious,
            self.surplus + other.surplus,
        )


def run(options: argparse.Namespace) -> int:
    """Print error rates and the agreement of boxes by kind of picture; return 1 if the gateway is worse than it may be."""
    if options.install:
        RAPIDOCR.install()
    RAPIDOCR.python()
    read: Callable[[bytes], list[ReadLine]]
    read = partial(read_by_request, options.url) if options.url else Steps(Path(environment.load().model_repository)).read
    try:
        pictures = list(text_pictures())
    except OSError as error:
        raise ContestantError(f"a font is missing; run: apt-get install {PACKAGES}") from error
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        for index, picture in enumerate(pictures):
            (Path(folder) / f"{index:04}.png").write_bytes(picture.body)
        say("RapidOCR reads")
        expected = read_with_rapidocr(Path(folder))
    say("the gateway reads")
    rows = compare(pictures, expected, [read(picture.body) for picture in pictures])
    say()
    print(_describe(rows))
    total = rows[-1]
    is_good = total.errors <= total.reference_errors + MAX_ERROR_DIFFERENCE * total.characters and min(total.ious) >= MIN_IOU
    return 0 if is_good else 1


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("text", help="reading of 200 rendered lines beside RapidOCR: error rates and boxes")
    command.add_argument("--url", help="a running gateway; by default its code reads in this process, with the pulled models")
    command.add_argument("--install", action="store_true", help="install RapidOCR's environment first, if it is missing")
    command.set_defaults(run=run)


def compare(pictures: Sequence[TextPicture], expected: Sequence[list[ReadLine]], found: Sequence[list[ReadLine]]) -> list[Row]:
    """Compare what was read with what is written, and boxes with RapidOCR's; the last row is the total."""
    rows: dict[str, Row] = {}
    for picture, reference, own in zip(pictures, expected, found, strict=True):
        overlaps = np.array([[_iou(one, other) for other in own] for one in reference]).reshape(len(reference), len(own))
        row = Row(
            picture.kind,
            len(picture.lines),
            len(_join(picture.lines)),
            count_errors(_join(picture.lines), _text(own)),
            count_errors(_join(picture.lines), _text(reference)),
            overlaps.max(axis=1, initial=0).tolist(),
            int((overlaps.max(axis=0, initial=0) < MIN_IOU).sum()),
        )
        for kind in (picture.kind, "all"):
            old = rows.get(kind)
            rows[kind] = row._replace(kind=kind) if old is None else old.plus(row)
    return [*(row for kind, row in rows.items() if kind != "all"), rows["all"]]


def count_errors(expected: str, found: str) -> int:
    """Return how many characters must be inserted, deleted or replaced (Levenshtein)."""
    costs = list(range(len(found) + 1))
    for row, wanted in enumerate(expected, 1):
        previous, costs[0] = costs[0], row
        for column, given in enumerate(found, 1):
            previous, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, previous + (wanted != given)),
            )
    return costs[-1]


def _join(lines: Sequence[str]) -> str:
    return " ".join(lines)


def _text(lines: Sequence[ReadLine]) -> str:
    return _join([line.text for line in lines if line.score >= _MIN_SCORE])


def _iou(one: ReadLine, other: ReadLine) -> float:
    shared, _ = cv2.intersectConvexConvex(one.corners, other.corners)
    return float(shared / (cv2.contourArea(one.corners) + cv2.contourArea(other.corners) - shared))


def _describe(rows: Sequence[Row]) -> str:
    cells = [
        (
            row.kind,
            str(row.lines),
            str(row.characters),
            f"{row.reference_errors / row.characters:.2%}",
            f"{row.errors / row.characters:.2%}",
            str(len(row.ious)),
            f"{min(row.ious, default=0):.3f}",
            str(sum(iou < MIN_IOU for iou in row.ious)),
            str(row.surplus),
        )
        for row in rows
    ]
    head = ("pictures", "lines", "characters", "RapidOCR errors", "errors", "boxes", "lowest IoU", f"below {MIN_IOU}", "surplus")
    return table([head, *cells])
