"""Search on a real PostgreSQL, measured."""

import pytest

from bench.__main__ import main


def test_search_is_measured_beside_an_exact_search_and_a_vector_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--vectors", "2000", "--rounds", "1", "--seconds", "1"]) == 0

    output = capsys.readouterr().out
    first, second, *filters = [
        line for line in output.splitlines() if line.startswith(("all ", "a filter leaves", "a tenant that"))
    ]
    assert [row.split()[1] for row in (first, second)] == ["200", "2,000"]
    assert [row.split()[1] for row in filters] == ["filter"] * 3 + ["tenant"]
    assert float(first.split()[2]) == 1  # few are compared one by one
    assert 0.95 <= float(second.split()[2]) <= 1
    assert "images a second" in output
    assert "the slowest question: " in output
    assert [line.split()[0] for line in output.splitlines() if " holds" in line or " NOT hold" in line][-2:] == ["vector", "search"]
