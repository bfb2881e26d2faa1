"""Charts."""

from itertools import pairwise

import pytest

from bench.report.charts import Bar, Line, draw_bars, draw_batches, draw_lines, linear_axis, log_axis, stack


def test_a_logarithmic_axis_covers_all_values() -> None:
    """Its ticks are 1, 2 and 5 of each decade, or only 1 where those are too many."""
    axis = log_axis([3.0, 40.0], "ms")

    assert (axis.low, axis.high) == (2, 50)
    assert list(axis.ticks.values()) == ["2", "5", "10", "20", "50"]
    assert axis.place(2) == 0
    assert axis.place(50) == pytest.approx(1)
    assert list(log_axis([0.01, 900.0], "ms").ticks.values()) == ["0.01", "0.1", "1", "10", "100", "1,000"]


def test_a_linear_axis_begins_at_zero() -> None:
    axis = linear_axis(730, "requests/s")

    assert (axis.low, axis.high) == (0, 800)
    assert list(axis.ticks.values()) == ["0", "200", "400", "600", "800"]
    assert axis.place(400) == 0.5


def test_labels_of_curves_that_end_together_do_not_overlap() -> None:
    """Each is drawn below the other; a name that is cut is written in full in a legend."""
    names = ["a", "b", "a name of more than nineteen letters"]
    lines = [Line(name, [(1.0, 1.0), (10.0, 10.0)]) for name in names]
    axis = log_axis([1.0, 10.0], "x")
    drawn = draw_lines(lines, axis, axis, dict.fromkeys(names, "red"))

    places = [float(part.partition('y="')[2].partition('"')[0]) for part in drawn.split("<text") if 'class="strong"' in part]
    assert all(abs(one - other) >= 16 for one, other in pairwise(places))
    assert names[2] in drawn.partition("<svg")[0]


def test_a_stack_adds_up() -> None:
    """The sum comes first, so that what is drawn later is in front; a curve without a point somewhere is zero there."""
    stacked = stack([Line("a", [(0.0, 1.0), (2.0, 3.0)]), Line("b", [(1.0, 5.0), (2.0, 7.0)])])

    assert stacked == [Line("b", [(0.0, 1.0), (1.0, 5.0), (2.0, 10.0)]), Line("a", [(0.0, 1.0), (1.0, 0.0), (2.0, 3.0)])]


def test_areas_reach_down_to_the_axis() -> None:
    """An area has the corners of its curve and two on the axis."""
    axis = linear_axis(10, "x")
    drawn = draw_lines([Line("a", [(0.0, 5.0), (10.0, 10.0)])], axis, axis, {"a": "red"}, areas=True)
    corners = drawn.partition('<polygon points="')[2].partition('"')[0].split()

    assert len(corners) == 4
    assert corners[0].partition(",")[2] == corners[-1].partition(",")[2]
    assert "<polygon" not in draw_lines([Line("a", [(0.0, 5.0)])], axis, axis, {"a": "red"})


def test_bars_of_very_different_length_show_shares() -> None:
    """On one scale, the shorter bar would be invisible."""
    drawn = draw_bars([Bar("a", {"x": 1.0}, "1"), Bar("b", {"x": 1000.0}, "1000")], {"x": "red"})

    assert "each bar shows shares of its own total" in drawn


def test_batch_sizes_that_did_not_occur_have_their_place() -> None:
    """The chart keeps the shape of the distribution."""
    drawn = draw_batches({"1": 1, "4": 3})

    assert drawn.count("<rect") == 4
    assert "batch of 4: 3 executions, 75%" in drawn
