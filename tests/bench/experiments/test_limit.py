"""The limits of the machine."""

import re

import pytest

from bench.__main__ import main
from bench.load.images import SAMPLE_FOLDER


def test_nereid_is_compared_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seconds", "0.5", "--clients", "2", "--workers", "1", "--images", str(SAMPLE_FOLDER)]
    assert main(["limit", *options]) == 0
    found = re.findall(r"^ *(.+?) +(\d+) (?:images|requests)/s", capsys.readouterr().out, re.MULTILINE)

    assert all(int(rate) > 0 for _, rate in found)
    assert [what for what, _ in found] == [
        *("decode and letterbox alone", "onto a new canvas each time", "HTTP alone, bodies read", "and forwarded to Triton"),
        *("at the rate of nereid_shm", "at the rate of nereid_file", "nereid_shm", "nereid_file"),
    ]
