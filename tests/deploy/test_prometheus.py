"""Prometheus's rules, as promtool computes them, and what they and the dashboard have from the code."""

import re
import subprocess
from pathlib import Path

import pytest

from app.api.routes import ModelRoute
from tests.deploy.dashboard import DASHBOARD
from tests.deploy.needs import PATHS, load
from tests.programs import require_program
from tests.prometheus import CONFIG
from tests.support import ROOT

FOLDER = CONFIG.parent


def promtool(*arguments: str, folder: Path = FOLDER) -> str:
    command = [require_program("promtool", "prometheus"), *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.system
def test_each_alert_comes_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_each_alert_has_scenarios_and_a_section_of_the_runbook() -> None:
    """Scenarios in which it fires, and in which it does not."""
    alerts = {rule["alert"]: rule for group in load(FOLDER / "alerts.yml")["groups"] for rule in group["rules"]}
    scenarios = load(FOLDER / "alerts_test.yml")["tests"]
    checks = {(check["alertname"], bool(check["exp_alerts"])) for one in scenarios for check in one.get("alert_rule_test", [])}
    sections = re.findall(r"^## (.+)$", (ROOT / "docs" / "how-to" / "runbook.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert checks == {(name, fires) for name in alerts for fires in (False, True)}
    assert alerts.keys() <= set(sections)
    for name, alert in alerts.items():
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/how-to/runbook.md#{name.lower()}"


@pytest.mark.parametrize("file", [FOLDER / "recordings.yml", DASHBOARD], ids=lambda file: str(file.name))
def test_requests_for_models_are_counted_of_all_tasks(file: Path) -> None:
    (pattern,) = set(re.findall(r'endpoint=~\\?"(.*?)\\?"', file.read_text(encoding="utf-8")))
    targets = {target for _, target in PATHS}
    routes = {target.template for target in targets if isinstance(target.handler, ModelRoute) and target.handler.takes != "text"}
    others = ("/metrics", "/models", "/v1/models", "/readyz", "/", "/nim/v1/health/live", "/ultralytics/v1/auth")

    assert {route for route in routes if not re.fullmatch(pattern, route)} == set()
    assert not any(re.fullmatch(pattern, route) for route in others)
