"""Characters from what a model is most certain of at each step of a line."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.outputs import TextSteps, read_text

LABELS = ("", "a", "b", "c", " ")


def read(classes: list[int], scores: list[float]) -> tuple[str, float]:
    return read_text(TextSteps(np.array(classes, np.int32), np.array(scores, np.float32)), LABELS)


@pytest.mark.parametrize(
    ("classes", "scores", "text", "score"),
    [
        ([0, 1, 1, 0, 1, 2, 0], [0.9, 0.8, 0.7, 0.9, 0.6, 0.5, 0.9], "aab", 0.63333),
        ([3, 4, 4, 1], [0.5, 0.25, 0.5, 1.0], "c a", 0.58333),
        ([2], [0.4], "b", 0.4),
        ([0, 0], [0.9, 0.9], "", 0.0),
        ([], [], "", 0.0),
    ],
)
def test_text_and_score_are_those_of_rapidocr(classes: list[int], scores: list[float], text: str, score: float) -> None:
    """Recorded from CTCLabelDecode of its release 3.10.0, which cannot decode a line without steps."""
    found_text, found_score = read(classes, scores)

    assert found_text == text
    assert found_score == pytest.approx(score, abs=1e-5)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=40))
def test_each_run_of_a_character_is_one_character_with_the_score_of_its_first_step(steps: list[tuple[int, float]]) -> None:
    runs = [next(run) for character, run in groupby(steps, key=lambda step: step[0]) if character]

    text, score = read([character for character, _ in steps], [score for _, score in steps])

    assert text == "".join(LABELS[character] for character, _ in runs)
    assert score == pytest.approx(np.mean([score for _, score in runs]) if runs else 0, abs=1e-6)
