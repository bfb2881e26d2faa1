"""Throughput over Tritons, workers and clients."""

import pytest

from bench.report.records import make_record
from bench.report.scaling import ScalePoint, scaling_text
from tests.bench.support import make_scaling


def test_each_point_is_represented_by_one_of_its_rounds() -> None:
    """So that two files can be compared."""
    runs = make_record({}, scalings=[make_scaling()]).all_runs

    assert [run.key for run in runs] == [
        (size, "scale: Tritons: wait_80_file, 1 worker", "wait_80_file", load)
        for load in ("1 client", "8 clients")
        for size in ("1 Triton", "2 Tritons")
    ]
    assert [run.outcome.rate for run in runs] == [60, 60, 60, 120]


def test_points_are_compared_with_the_smallest_gateway_under_the_same_load() -> None:
    scaling = make_scaling("worker")

    assert scaling.title == "workers: wait_80_file, 1 Triton"
    assert [scaling.size(point) for point in scaling.points] == ["1 worker", "2 workers"] * 2
    assert [scaling.base(point) for point in scaling.points] == [scaling.points[0]] * 2 + [scaling.points[2]] * 2


def test_calls_and_images_of_all_rounds_are_added_up() -> None:
    scaling = make_scaling()
    point = scaling.points[3]
    point.rounds[0].images_by_triton = [10, 30]
    point.rounds[1].images_by_triton = []

    assert point.images == [10, 30]
    assert point.image_shares == [0.25, 0.75]
    assert point.images_per_call == 1
    assert scaling.call_sizes == ["1", "3-4"]
    assert scaling.call_shares(point) == {"1": 0.5, "3-4": 0.5}


def test_what_was_not_measured_divides_nothing_by_zero() -> None:
    """A measurement may be stopped before its first round."""
    scaling = make_scaling()
    point = ScalePoint(tritons=1, workers=1, clients=64)
    scaling.points.append(point)

    assert point not in scaling.measured
    assert len(scaling.runs()) == 4
    assert point.images_per_call == pytest.approx(0)
    assert scaling.call_shares(point) == {"1": 0, "3-4": 0}


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
