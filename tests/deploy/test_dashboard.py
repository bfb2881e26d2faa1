"""The Grafana dashboard as a file: its structure, and what Prometheus thinks of its expressions."""

import itertools
import re
from pathlib import Path

import msgspec

from tests.deploy.dashboard import DASHBOARD, PANELS, VARIABLES, Panel
from tests.deploy.test_prometheus import promtool

CHARTS = [panel for panel in PANELS if panel.type != "row"]


def cells(panel: Panel) -> set[tuple[int, int]]:
    place = panel.grid_pos
    return set(itertools.product(range(place.x, place.x + place.w), range(place.y, place.y + place.h)))


def test_panels_do_not_overlap() -> None:
    """Each has an id of its own, and a place within the 24 columns; they are in the order in which they are read."""
    covered = [cell for panel in PANELS for cell in cells(panel)]
    places = [(panel.grid_pos.y, panel.grid_pos.x) for panel in PANELS]

    assert len({panel.id for panel in PANELS}) == len(PANELS)
    assert len(covered) == len(set(covered))
    assert {column for column, _ in covered} == set(range(24))
    assert places == sorted(places)


def test_panels_have_names_of_their_own() -> None:
    assert len({panel.title for panel in CHARTS}) == len(CHARTS)
    for panel in CHARTS:
        assert panel.targets
        assert len({target.ref_id for target in panel.targets}) == len(panel.targets)
        assert panel.type == "stat" or all(target.legend_format for target in panel.targets)


def test_variables_are_used_and_defined() -> None:
    """Every panel asks the data source that the user chose, and expressions use no variable that there is not."""
    text = DASHBOARD.read_text(encoding="utf-8")
    sources = re.findall(r'"datasource": \{"type": "prometheus", "uid": "([^"]*)"\}', text)
    used = {name for panel in CHARTS for target in panel.targets for name in re.findall(r"\$(\w+)", target.expr)}

    assert set(sources) == {"${datasource}"}
    assert len(sources) == len(CHARTS) + len(VARIABLES) - 1
    assert {"datasource", *used} - {"__rate_interval"} == VARIABLES


def test_every_expression_is_valid(tmp_path: Path) -> None:
    """Promtool checks the expressions as if they were rules."""
    expressions = [target.expression("1m") for panel in CHARTS for target in panel.targets]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    (tmp_path / "rules.yml").write_bytes(msgspec.json.encode({"groups": [{"name": "panels", "rules": rules}]}))

    assert f"{len(expressions)} rules found" in promtool("check", "rules", "--lint-fatal", "rules.yml", folder=tmp_path)
