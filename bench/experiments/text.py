"""Text in pictures of rendered lines: a running gateway beside RapidOCR, of whose models it makes its own."""

import argparse
import json
import subprocess
from collections.abc import Sequence
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.experiments.options import Commands
from bench.experiments.service import one_line
from bench.harness.environments import RAPIDOCR
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT
from bench.load.text_pictures import PACKAGES, TextPicture, text_pictures
from bench.report.progress import say
from bench.report.text import table

MAX_ERROR_DIFFERENCE = 0.002
"""By how much the gateway's character error rate may be above RapidOCR's."""
MIN_IOU = 0.95
"""Minimum of the intersection over union of each of RapidOCR's boxes with one of the gateway's."""
# RapidOCR's `text_score`, below which it drops a line, and its `box_thresh`.
_MIN_SCORE = _CONFIDENCE = 0.5


class ReadLine(NamedTuple):
    """A line of text in a picture."""

    corners: NDArray[np.float32]
    """(4, 2) x y, pixels of the picture."""
    text: str
    score: float


class Row(NamedTuple):
    """The results on pictures of one kind; those of several kinds add up."""

    lines: int
    characters: int
    errors: int
    """Of the gateway: characters to insert, delete or replace."""
    reference_errors: int
    ious: list[float]
    """For each of RapidOCR's boxes, the best intersection over union with the gateway's."""
    surplus: int
    """Number of the gateway's boxes that are not one of RapidOCR's."""


def run(options: argparse.Namespace) -> int:
    """Print error rates and the agreement of boxes by kind of picture; return 1 if the gateway is worse than it may be."""
    if options.install:
        RAPIDOCR.install()
    RAPIDOCR.python()
    try:
        pictures = list(text_pictures())
    except OSError as error:
        raise ContestantError(f"a font is missing; run: apt-get install {PACKAGES}") from error
    say("the gateway reads")
    with one_line(options.url):
        found = [_read(options.url, picture.body) for picture in pictures]
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        for index, picture in enumerate(pictures):
            (Path(folder) / f"{index:04}.png").write_bytes(picture.body)
        say("RapidOCR reads")
        expected = _read_with_rapidocr(Path(folder))
    rows = compare(pictures, expected, found)
    say()
    print(_describe(rows))
    total = rows["all"]
    is_good = total.errors <= total.reference_errors + MAX_ERROR_DIFFERENCE * total.characters and min(total.ious) >= MIN_IOU
    return 0 if is_good else 1


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("text", help="200 rendered lines beside RapidOCR: error rates and boxes (a server must run)")
    command.add_argument("--url", default="http://127.0.0.1:4603", help="URL of a gateway with the models of `pull ocr`")
    command.add_argument("--install", action="store_true", help="install RapidOCR's environment first, if it is missing")
    command.set_defaults(run=run)


def compare(pictures: Sequence[TextPicture], expected: Sequence[list[ReadLine]], found: Sequence[list[ReadLine]]) -> dict[str, Row]:
    """Compare what was read with what is written, and boxes with RapidOCR's, by kind of picture; the last row is the total."""
    rows: dict[str, Row] = {}
    for picture, reference, own in zip(pictures, expected, found, strict=True):
        overlaps = np.array([[_iou(one, other) for other in own] for one in reference]).reshape(len(reference), len(own))
        written = " ".join(picture.lines)
        row = Row(
            len(picture.lines),
            len(written),
            count_errors(written, _text(own)),
            count_errors(written, _text(reference)),
            overlaps.max(axis=1, initial=0).tolist(),
            int((overlaps.max(axis=0, initial=0) < MIN_IOU).sum()),
        )
        for kind in (picture.kind, "all"):
            rows[kind] = Row(*map(add, rows[kind], row)) if kind in rows else row
    total = rows.pop("all")
    return rows | {"all": total}


def count_errors(expected: str, found: str) -> int:
    """Return how many characters must be inserted, deleted or replaced (Levenshtein)."""
    costs = list(range(len(found) + 1))
    for row, wanted in enumerate(expected, 1):
        previous, costs[0] = costs[0], row
        for column, given in enumerate(found, 1):
            cheapest = min(costs[column] + 1, costs[column - 1] + 1, previous + (wanted != given))
            previous, costs[column] = costs[column], cheapest
    return costs[-1]


def _read(url: str, picture: bytes) -> list[ReadLine]:
    """Return the lines that a gateway finds in an encoded picture, whatever their score."""
    try:
        with urlopen(f"{url}/ocr/predict?min_det_score={_CONFIDENCE}&min_rec_score=0", picture, timeout=60) as response:  # noqa: S310 - it is http
            regions = json.load(response)["regions"]
    except HTTPError as error:
        raise ContestantError(f"{error.url} answers with status {error.code}; it needs the models of ./just pull ocr") from error
    lines = [ReadLine(np.array(one["box"], np.float32).reshape(4, 2), one["text"], one["rec_score"]) for one in regions]
    return [line for line in lines if line.text.strip()]


def _read_with_rapidocr(folder: Path) -> list[list[ReadLine]]:
    """Return the lines that RapidOCR finds in the pictures of a folder, in the order of their names, whatever their score."""
    program = ROOT / "bench" / "contestants" / "rapid_ocr.py"
    done = subprocess.run([RAPIDOCR.python(), program, folder], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ContestantError("RapidOCR failed; the reason is above")
    pictures = msgspec.json.Decoder(list[dict[str, Any]]).decode_lines(done.stdout)
    return [[ReadLine(np.array(one["corners"], np.float32), one["text"], one["score"]) for one in lines] for lines in pictures]


def _text(lines: Sequence[ReadLine]) -> str:
    return " ".join(line.text for line in lines if line.score >= _MIN_SCORE)


def _iou(one: ReadLine, other: ReadLine) -> float:
    shared, _ = cv2.intersectConvexConvex(one.corners, other.corners)
    return float(shared / (cv2.contourArea(one.corners) + cv2.contourArea(other.corners) - shared))


def _describe(rows: dict[str, Row]) -> str:
    head = ("pictures", "lines", "characters", "RapidOCR errors", "errors", "boxes", "lowest IoU", f"below {MIN_IOU}", "surplus")
    cells = [
        (
            kind,
            str(row.lines),
            str(row.characters),
            f"{row.reference_errors / row.characters:.2%}",
            f"{row.errors / row.characters:.2%}",
            str(len(row.ious)),
            f"{min(row.ious, default=0):.3f}",
            str(sum(iou < MIN_IOU for iou in row.ious)),
            str(row.surplus),
        )
        for kind, row in rows.items()
    ]
    return table([head, *cells])
