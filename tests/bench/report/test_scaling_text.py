"""A scaling as a table."""

from bench.report.scaling_text import scaling_text
from tests.bench.support import make_scaling


def test_every_point_has_a_row() -> None:
    """With its throughput, the ratio to the smallest gateway, and the shares of its calls and of each Triton's images."""
    head, columns, _, *rows = scaling_text(make_scaling()).splitlines()

    assert head == "Tritons: wait_80_file, 1 worker; medians of 2 interleaved rounds of 2 s"
    assert columns.split("  ")[0] == "clients"
    assert [row.split()[:3] for row in rows[:4]] == [
        ["1", "1", "55.0"],
        ["1", "2", "55.0"],
        ["8", "1", "55.0"],
        ["8", "2", "110"],
    ]
    assert "2.00 x (2.00..2.00)" in rows[3]
    assert rows[3].split()[-4:] == ["50%", "50%", "50%", "50%"]


def test_with_one_triton_nothing_is_said_of_shares() -> None:
    assert "images by Triton" not in scaling_text(make_scaling("worker"))


def test_what_limits_the_figures_is_said() -> None:
    scaling = make_scaling()
    (first, *_) = scaling.points[0].rounds
    first.outcome.driver_cpu, first.triton_note = 0.9, "Triton is gone"
    text = scaling_text(scaling)

    assert "the client used more than 80% of a core" in text
    assert text.endswith("Triton is gone")
