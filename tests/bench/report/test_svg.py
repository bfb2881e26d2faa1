"""SVG elements."""

from bench.report.svg import area, colour, dot, legend, polyline, rectangle, shorten, text


def test_names_are_escaped_wherever_they_are_written() -> None:
    """Names may come from the command line."""
    elements = [
        text(0, 0, "<b>"),
        dot(0, 0, "red", "<b>"),
        area([(0, 0)], 0, "red", "<b>"),
        polyline([(0, 0)], "red", "<b>"),
        rectangle((0, 0), (1, 1), "red", "<b>"),
        legend({"<b>": "red"}),
    ]

    assert all("<b>" not in element and "&lt;b&gt;" in element for element in elements)


def test_long_names_are_cut() -> None:
    assert shorten("nereid", 6) == "nereid"
    assert shorten("nereid_shm", 6) == "nerei…"


def test_colours_repeat() -> None:
    assert colour(1) == colour(9) != colour(2)
