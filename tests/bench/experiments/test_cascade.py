"""A cascade beside its parts."""

import pytest

from bench.__main__ import main


def test_a_cascade_is_measured_beside_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cascade", "--rounds", "1"]) == 0
    *_, head, _, large_cpu, large_wall, cpu, wall, note = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["image", "ms", "of"]
    assert [row.split()[-5] for row in (large_cpu, large_wall, cpu, wall)] == ["cpu", "wall"] * 2
    assert "4 chains, 20 crops" in note
