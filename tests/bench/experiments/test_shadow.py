"""What a request notices of a shadow."""

import re

import pytest

from bench.__main__ import main
from bench.load.images import SAMPLE_FOLDER


def test_a_shadow_is_measured_beside_an_a_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seconds", "1", "--rounds", "1", "--workers", "1", "--images", str(SAMPLE_FOLDER), "--share", "1"]

    assert main(["shadow", *options]) == 0
    *_, head, _, without, again, shadow, note = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "route"
    assert [row.split()[0] for row in (without, again, shadow)] == ["without", "again", "shadow"]
    assert re.search(r"sim_gpu gets 100% of them: \d+ (compared|dropped)", note)
