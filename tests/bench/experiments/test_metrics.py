"""What metrics cost is measured."""

import re

import pytest

from bench.__main__ import main


def test_request_and_scrape_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--rounds", "2"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["request", "scrape"]
    for line in lines:
        middle, least, most = map(float, re.findall(r"\d+\.\d", line))
        assert 0 < least <= middle <= most
