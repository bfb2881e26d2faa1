"""Drawing a dashboard."""

from bench.report.dashboard import Dashboard, Defaults, FieldConfig, Panel, Place, Stacking, Style, Templating
from bench.report.dashboard_page import Curve, dashboard_page
from tests.bench.report.elements import Elements


def panel(number: int, kind: str = "timeseries", unit: str = "short", stacking: str = "none") -> Panel:
    config = FieldConfig(Defaults(unit, Style(Stacking(stacking))))
    return Panel(number, kind, f"Panel <{number}>", Place(x=8, y=3, w=8, h=4), field_config=config)


def draw(made: Panel, *curves: Curve) -> str:
    page = dashboard_page(Dashboard("d", "Nereid", Templating([]), [made]), {made.id: curves}, 60)
    elements = Elements(page)
    assert not elements.open
    assert not elements.links
    return page


def test_a_panel_is_drawn_at_its_place() -> None:
    page = draw(panel(1, unit="percentunit"), Curve("failed", [(0.0, 0.25), (60.0, 0.75)]))

    assert "grid-column:9/span 8;grid-row:4/span 4" in page
    assert "Panel &lt;1&gt;" in page
    assert ">80</text>" in page
    assert ">%</text>" in page


def test_stacked_curves_are_areas() -> None:
    curves = [Curve(name, [(0.0, 30.0), (60.0, 30.0)]) for name in ("a", "b", "c")]

    assert draw(panel(1, stacking="normal"), *curves).count("<polygon") == 3
    assert ">100</text>" in draw(panel(1, stacking="normal"), *curves)
    assert "<polygon" not in draw(panel(1), *curves)


def test_a_single_figure_is_the_last_one() -> None:
    """If its series has a name, the name is what the panel tells."""
    points = [(0.0, 1.0), (60.0, 2.5)]

    assert ">2.50 requests/s<" in draw(panel(1, "stat", "reqps"), Curve("", points))
    assert ">0.1.0 <" in draw(panel(1, "stat"), Curve("0.1.0", points))


def test_what_has_no_data_says_so() -> None:
    assert "no data" in draw(panel(1))
    assert "no data" in draw(panel(1), Curve("a", []))
    assert "no data" not in draw(panel(1, "row"))
