"""Latency below the capacity."""

import pytest

from bench.__main__ import main
from bench.experiments import tail
from bench.load.images import SAMPLE_FOLDER


@pytest.mark.system
def test_each_server_gets_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """The minimal server is the first: it shows what the machine adds by itself."""
    options = ["--seconds", "0.6", "--rounds", "1", "--clients", "2", "--workers", "1", "--images", str(SAMPLE_FOLDER)]

    assert main(["tail", "--only", "nereid_file", *options]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")]
    assert [row.split("  ")[0] for row in rows] == [tail.MINIMAL, "nereid_file"]
    assert all(row.endswith("0.0%") for row in rows)
