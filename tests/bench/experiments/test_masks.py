"""Masks beside boxes alone."""

import pytest

from bench.__main__ import main
from bench.experiments.masks import FORMATS


def test_each_form_of_masks_gets_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """The experiment itself checks that each response has the masks that it asks for."""
    assert main(["masks", "--seconds", "0.3", "--rounds", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row for row in rows if row and row[0] in FORMATS}
    assert [*found] == [*FORMATS]
    assert found["none"][2] == "1.00"
    assert float(found["polygon"][3]) > 10 * float(found["none"][3])
