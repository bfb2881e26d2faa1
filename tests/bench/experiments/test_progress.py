"""What a person sees while a measurement runs."""

import pytest

from bench.experiments.progress import say, with_bar
from bench.load.driver import Progress
from bench.load.outcome import Outcome
from tests.bench.support import make_outcome


def test_a_file_gets_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    expected = make_outcome([1.0])

    def measure(progress: Progress) -> Outcome:
        progress(0.5, 3)
        return expected

    say("round 1")

    assert with_bar("quick", 1.0, measure) is expected
    assert capsys.readouterr() == ("", "")
