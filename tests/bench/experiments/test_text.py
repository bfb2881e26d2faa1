"""What is read beside what is written."""

import numpy as np
import pytest

from bench.__main__ import main
from bench.experiments.text import compare, count_errors
from bench.harness.environments import RAPIDOCR
from bench.harness.reading import ReadLine
from bench.load.text_pictures import TextPicture
from tests.support import REPOSITORY


def line(text: str, left: int = 0, score: float = 1.0) -> ReadLine:
    corners = np.array([[left, 0], [left + 100, 0], [left + 100, 20], [left, 20]], np.float32)
    return ReadLine(corners, text, score)


@pytest.mark.parametrize(
    ("expected", "found", "errors"),
    [("kitten", "sitting", 3), ("", "ab", 2), ("ab", "", 2), ("same", "same", 0), ("图书馆", "图馆", 1)],
)
def test_errors_are_characters_to_insert_delete_or_replace(expected: str, found: str, errors: int) -> None:
    assert count_errors(expected, found) == errors


def test_lines_and_boxes_are_compared_by_kind_of_picture_and_in_total() -> None:
    """Lines with a low score count as not read, but their boxes count."""
    pictures = [TextPicture("plain", b"", ["one two"]), TextPicture("page", b"", ["three", "four"])]
    expected = [[line("one two")], [line("three"), line("four", 200)]]
    found = [[line("one tw0")], [line("three", 3), line("four", 210, score=0.4), line("5", 500)]]

    plain, page, total = compare(pictures, expected, found)

    assert (plain.kind, plain.lines, plain.characters, plain.errors, plain.reference_errors) == ("plain", 1, 7, 1, 0)
    assert (page.lines, page.characters, page.errors, page.reference_errors, page.surplus) == (2, 10, 4, 0, 3)
    assert page.ious == pytest.approx([97 / 103, 90 / 110])
    assert (total.kind, total.lines, total.errors, len(total.ious)) == ("all", 3, 5, 3)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not RAPIDOCR.is_installed(), reason=RAPIDOCR.missing)
@pytest.mark.skipif(
    not (REPOSITORY / "ocr_recognition").is_dir(), reason="the published network of ocr_recognition has not been pulled"
)
def test_the_gateway_reads_as_rapidocr(capsys: pytest.CaptureFixture[str]) -> None:
    """With the pulled models; the experiment itself checks error rates and boxes."""
    assert main(["text"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["all", "200"]
