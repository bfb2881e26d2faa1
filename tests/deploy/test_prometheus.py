"""Prometheus's configuration and its rules, as promtool sees them, and the variables of the Grafana dashboard."""

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.api.routes import ModelRoute
from tests.deploy.dashboard import DASHBOARD, PANELS, VARIABLES
from tests.deploy.paths import PATHS
from tests.programs import require_program
from tests.prometheus import CONFIG
from tests.support import ROOT

FOLDER = CONFIG.parent
ALERTS = [rule for group in msgspec.yaml.decode((FOLDER / "alerts.yml").read_bytes())["groups"] for rule in group["rules"]]
RUNBOOK = ROOT / "docs" / "how-to" / "runbook.md"


def promtool(*arguments: str, folder: Path = FOLDER) -> str:
    command = [require_program("promtool", "prometheus"), *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.system
def test_the_configuration_is_valid() -> None:
    shown = promtool("check", "config", "--lint-fatal", CONFIG.name)

    assert "2 rule files found" in shown
    assert f"{len(ALERTS)} rules found" in shown


@pytest.mark.system
def test_each_alert_comes_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_each_alert_has_a_scenario_that_fires_and_one_that_does_not() -> None:
    scenarios = msgspec.yaml.decode((FOLDER / "alerts_test.yml").read_bytes())["tests"]
    checks = [check for scenario in scenarios for check in scenario.get("alert_rule_test", [])]
    fires = {check["alertname"] for check in checks if check["exp_alerts"]}
    is_silent = {check["alertname"] for check in checks if not check["exp_alerts"]}

    assert fires == is_silent == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_each_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    sections = [line.removeprefix("## ") for line in RUNBOOK.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]

    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert alert["annotations"]["runbook"] == f"docs/how-to/runbook.md#{alert['alert'].lower()}"
    assert alert["alert"] in sections


@pytest.mark.parametrize("file", [FOLDER / "recordings.yml", DASHBOARD], ids=lambda file: str(file.name))
def test_requests_for_models_are_counted_of_all_tasks(file: Path) -> None:
    patterns = set(re.findall(r'endpoint=~\\?"(.*?)\\?"', file.read_text(encoding="utf-8")))
    targets = {target for _, target in PATHS}
    routes = {target.template for target in targets if isinstance(target.handler, ModelRoute) and target.handler.takes != "text"}

    assert len(patterns) == 1
    for pattern in patterns:
        assert {route for route in routes if not re.fullmatch(pattern, route)} == set()
        others = ("/metrics", "/models", "/v1/models", "/readyz", "/", "/nim/v1/health/live")
        assert not any(re.fullmatch(pattern, route) for route in (*others, "/ultralytics/v1/auth"))


def test_variables_of_the_dashboard_are_used_and_defined() -> None:
    charts = [panel for panel in PANELS if panel.type != "row"]
    text = DASHBOARD.read_text(encoding="utf-8")
    sources = re.findall(r'"datasource": \{"type": "prometheus", "uid": "([^"]*)"\}', text)
    used = {name for panel in charts for target in panel.targets for name in re.findall(r"\$(\w+)", target.expr)}

    assert set(sources) == {"${datasource}"}
    assert len(sources) == len(charts) + len(VARIABLES) - 1
    assert {"datasource", *used} - {"__rate_interval"} == VARIABLES
