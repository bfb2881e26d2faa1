"""Grafana's JSON."""

from pathlib import Path

import msgspec
import pytest

from bench.report.dashboard import Target, everything, fill_in, load_dashboard

_PANEL = {
    "id": 7,
    "type": "timeseries",
    "title": "Requests",
    "gridPos": {"h": 8, "w": 12, "x": 12, "y": 1},
    "fieldConfig": {"defaults": {"unit": "reqps", "custom": {"stacking": {"mode": "normal"}}}, "overrides": []},
    "targets": [{"refId": "A", "expr": "sum(x)", "legendFormat": "{{status}}"}],
}
_DASHBOARD = {"uid": "d", "title": "D", "templating": {"list": [{"name": "model", "type": "query"}]}, "panels": [_PANEL]}


def test_a_dashboard_is_read(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    bare = {name: _PANEL[name] for name in ("id", "type", "title", "gridPos")}
    file.write_bytes(msgspec.json.encode(_DASHBOARD | {"panels": [_PANEL, bare]}))
    panel, default = load_dashboard(file).panels

    assert (panel.unit, panel.is_stacked, panel.grid_pos.x, panel.targets[0].expr) == ("reqps", True, 12, "sum(x)")
    assert (default.unit, default.is_stacked, default.targets) == ("short", False, [])


def test_what_is_no_dashboard_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text('{"title": "D"}', encoding="utf-8")

    with pytest.raises(msgspec.DecodeError):
        load_dashboard(file)


@pytest.mark.parametrize("expression", ["rate(x[$__rate_interval])", "rate(x[${__rate_interval}])"])
def test_variables_are_filled_in(expression: str) -> None:
    """Grafana has two notations; a variable without a value is an error."""
    assert fill_in(expression, everything("1m")) == "rate(x[1m])"
    with pytest.raises(KeyError):
        fill_in("$nothing", everything("1m"))


def test_series_are_named_after_their_labels() -> None:
    assert Target("A", "x", "{{model}}: {{ reason }}").name({"model": "yolo11n"}) == "yolo11n: "
