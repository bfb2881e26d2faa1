"""The part of a page about scaling."""

from bench.report.page import page
from bench.report.records import make_record
from tests.bench.report.elements import Elements
from tests.bench.support import make_scaling


def test_throughput_is_drawn_over_tritons_and_over_clients() -> None:
    """Each has a curve per load or size; the calls have a bar per point."""
    text = page([("scale", make_record({}, scalings=[make_scaling()]))])

    assert not Elements(text).open
    assert "<h2>Scaling over Tritons: wait_80_file, 1 worker</h2>" in text
    assert "<td>2.00 x (2.00..2.00)</td>" in text
    assert text.count("<polyline") == 2 + 2
    assert text.count("<rect") == 2 * 1 + 2 * 2
    assert "2 Tritons, 8 clients: 3-4 0.50" in text


def test_a_single_size_has_no_curve_over_sizes() -> None:
    """Nor is anything drawn of a scaling without a round, or of calls that were not counted."""
    single, empty = make_scaling("worker"), make_scaling()
    single.points = single.points[::2]
    for point in [*single.points, *empty.points]:
        for one in point.rounds:
            one.calls = {}
    for point in empty.points:
        point.rounds = []
    text = page([("scale", make_record({}, scalings=[single, empty]))])

    assert text.count("<h3>") == text.count("<h3>Throughput over clients</h3>") == 1
    assert text.count("<section>") == 1
