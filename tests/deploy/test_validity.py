"""What the programs that read the shipped files say of them; and what Prometheus, the dashboard and NGINX have from the code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from app.api.admin import ROUTES
from app.api.context import PAUSE_SECONDS
from app.api.dialects.kserve import control
from app.api.receiving.client_watch import body_too_large
from app.api.routes import VERSION, ModelRoute
from app.errors import BodyTooLarge, MalformedRequest
from app.settings.schema import DIALECTS, Settings
from app.zoo.recognize import MAX_MODEL_BYTES
from tests.deploy.needs import DASHBOARD, DEPLOY, MODELS, PATHS, PROJECTS, UNITS, load, upstream
from tests.nginx import SHIPPED, prepare
from tests.processes import require_program
from tests.prometheus import CONFIG
from tests.support import ROOT

FOLDER = CONFIG.parent
WORKFLOWS = ROOT / ".github" / "workflows"
NGINX = (SHIPPED / "nereid.conf").read_text(encoding="utf-8")
PATTERNS: list[str] = re.findall(r"location ~ (.+?) \{\n", NGINX)
OWN, SEVERAL, RECORDS, CHANGES, OTHERS = PATTERNS[:5]
"""For one image, for several, for what search keeps, for changes on this machine, for dialects."""


def output(*command: str | Path, folder: Path = DEPLOY, **environment: str) -> tuple[int, str]:
    """Run a program in a folder; return its exit code, and what it says."""
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def promtool(*arguments: str, folder: Path = FOLDER) -> str:
    code, said = output(require_program("promtool", "prometheus"), *arguments, folder=folder)
    assert code == 0, said
    return said


@pytest.mark.system
def test_each_alert_comes_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@pytest.mark.system
def test_adapter_measures_the_model_that_has_most_to_do(tmp_path: Path) -> None:
    rules = load(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]
    queries = [
        rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"')
        for rule in [*rules["custom"], *rules["external"]]
    ]
    metrics = {"model_active_requests": (40, 0, 0), "model_request_limit": (40, 200, 8), "inference_waiting_images": (30, 0, 2)}
    series = [
        {"series": f'api_{metric}{{pod="a", model="{model}"}}', "values": str(value)}
        for metric, values in metrics.items()
        for model, value in zip(("full", "idle", "other"), values, strict=True)
    ]
    expected = [
        {"expr": query, "eval_time": "0m", "exp_samples": [{"labels": labels, "value": value}]}
        for query, labels, value in zip(queries, ('{pod="a"}', "{}"), (1, 32), strict=True)
    ]
    (tmp_path / "test.yml").write_bytes(msgspec.json.encode({"tests": [{"input_series": series, "promql_expr_test": expected}]}))

    assert "SUCCESS" in promtool("test", "rules", "test.yml", folder=tmp_path)


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


@pytest.mark.parametrize("schema", ["compose-spec", "github-workflows", "github-workflows-require-timeout"])
def test_files_fit_their_schemas(schema: str, tmp_path: Path) -> None:
    files = [*WORKFLOWS.glob("*.yml")]
    if schema == "compose-spec":
        own = [*ROOT.glob("compose*.yaml"), *DEPLOY.glob("compose*.yaml"), DEPLOY / "stack.yaml"]
        files = [*own, *(tmp_path / f"{name}.json" for name in PROJECTS)]
        for path in files[-len(PROJECTS) :]:
            path.write_bytes(msgspec.json.encode(PROJECTS[path.stem]))
    kind = "custom" if schema.endswith("timeout") else "vendor"
    code, said = output(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"{kind}.{schema}", *files)

    assert code == 0, said


@pytest.mark.parametrize(("name", "command"), [("ci", ".ci/run"), ("release", "./just release ")])
def test_workflow_runs_what_runs_elsewhere_and_can_change_nothing(name: str, command: str) -> None:
    """Requests from forks run their own code. What publishes a release runs none of it."""
    workflow = load(WORKFLOWS / f"{name}.yml")
    job, *others = workflow["jobs"].values()

    assert [step["run"] for step in job["steps"] if "run" in step][-1].startswith(command)
    assert (workflow["permissions"], "permissions" in job) == ({"contents": "read"}, False)
    assert [step["with"]["persist-credentials"] for step in job["steps"] if "checkout" in step.get("uses", "")] == [False]
    assert not [step for other in others for step in other["steps"] if "checkout" in step.get("uses", "")]


@pytest.mark.system
def test_docker_accepts_the_stack_and_ignores_nothing() -> None:
    """Its command line checks a stack, and names what it does not support, before it looks for an engine."""
    nowhere = "unix:///nowhere/docker.sock"
    command = [require_program("docker", "docker.io"), "stack", "deploy", "--detach", "--compose-file=stack.yaml", "nereid"]
    _, said = output(*command, DOCKER_HOST=nowhere)
    if "unknown flag: --detach" in said:
        pytest.skip("this docker is too old for a stack without a version")

    assert nowhere in said
    assert "Ignoring" not in said


@pytest.mark.system
@pytest.mark.parametrize(("unit", "drop_ins"), [*((unit, []) for unit in UNITS), ("tritonserver@.service", [MODELS])])
def test_systemd_accepts_the_units(unit: str, drop_ins: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    (tmp_path / f"{unit}.d").mkdir()
    for name, copy in {unit: unit, **{name: f"{unit}.d/{name}" for name in drop_ins}}.items():
        text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
        (tmp_path / copy).write_text(re.sub(r"^(ExecSt\w+=)\S+", rf"\1{program}", text, flags=re.MULTILINE), encoding="utf-8")
    (tmp_path / "docker.service").write_text(f"[Service]\nExecStart={program}\n", encoding="ascii")
    analyze = require_program("systemd-analyze", "systemd")

    assert output(analyze, "verify", "--man=no", tmp_path / unit) == (0, "")
    # Up to 40 tenths are "OK" to it.
    assert output(analyze, "security", "--offline=true", "--threshold=20", "--no-pager", f"systemd/{unit}")[0] == 0


@pytest.mark.system
@pytest.mark.parametrize("instance", ["unix:/run/nereid-1.sock", "127.0.0.1:1"])
def test_nginx_accepts_the_files(instance: str, tmp_path: Path) -> None:
    """Without a complaint; from 1.25.1 on it prefers another way to write `http2`."""
    said = prepare([instance] * 3, tmp_path).check().splitlines()

    assert [line for line in said if "[" in line and "http2" not in line] == []


@pytest.mark.system
@pytest.mark.parametrize("name", ["", ".compose", ".swarm", ".kubernetes"])
def test_prometheus_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    """Debian's promtool knows no discovery in Kubernetes, so that fixed targets take its place."""
    config = load(DEPLOY / "prometheus" / f"prometheus{name}.yml")
    config["rule_files"] = [str(DEPLOY / "prometheus" / rules) for rules in config["rule_files"]]
    for job in config["scrape_configs"]:
        job.pop("authorization", None)  # its file is not here
        if job.pop("kubernetes_sd_configs", None):
            job["static_configs"] = [{"targets": ["127.0.0.1:1"]}]
    (tmp_path / "prometheus.yml").write_bytes(msgspec.yaml.encode(config))

    assert "2 rule files found" in promtool("check", "config", "--lint-fatal", "prometheus.yml", folder=tmp_path)


def sample(path: str) -> str:
    return re.sub(r"\{\w+:str\}", "tiny", path.replace("{version:int}", "3"))


def seconds(directive: str, text: str = NGINX) -> float:
    (value,) = re.findall(rf"^ {{4}}{directive} ([^;]+)s;", text, re.MULTILINE)
    return float(value)


def test_limits_and_names_of_errors_are_those_of_the_gateway() -> None:
    """And NGINX closes idle connections first: otherwise it could send a request on one that the gateway is closing."""
    settings, instances = Settings(), upstream("upstream.conf")
    limits = (settings.max_body_bytes, settings.max_batch_bytes, MAX_MODEL_BYTES)
    sizes = (settings.max_file_size_mb, settings.max_batch_size_mb, MAX_MODEL_BYTES >> 20)

    assert re.findall(r"client_max_body_size (\S+);", NGINX) == [f"{size:g}m" for size in sizes]
    assert all(f' "{body_too_large(limit).detail.removeprefix("the limit is ")}";' in NGINX for limit in limits)
    assert seconds("client_body_timeout") == PAUSE_SECONDS
    assert seconds("proxy_read_timeout") > settings.max_timeout_seconds > settings.timeout_seconds
    assert re.findall(r"proxy_next_upstream_tries (\d+);", NGINX) == [str(len(instances) + 1), str(len(instances))]
    for error in (BodyTooLarge, MalformedRequest):
        assert f"    {error.status} {error.code};\n" in NGINX
        assert f'    {error.status} "{error.title}";\n' in NGINX
    text = (SHIPPED / "upstream.conf").read_text(encoding="utf-8")
    assert seconds("keepalive_timeout", text) < settings.keep_alive_seconds


def test_each_path_at_which_a_model_is_asked_is_public_with_its_limit() -> None:
    for path, (handler, *_) in PATHS:
        location = next((pattern for pattern in (OWN, SEVERAL, RECORDS, OTHERS) if re.search(pattern, sample(path))), None)
        assert (location is None) == (path in {"/health", "/v1/auth"} or bool(re.search(CHANGES, sample(path)))), path
        assert (location == SEVERAL) == (isinstance(handler, ModelRoute) and handler.takes == "images") or path == "/predict", path
    assert all(re.search(OTHERS, f"/{name}/anything") for name in DIALECTS)


def test_models_are_changed_at_the_location_that_only_this_machine_has() -> None:
    """Also below a dialect's name, whose location takes everything else: the first location that matches counts."""
    changes = {sample(prefix + path) for path in control.paths for prefix in ("", "/kserve")}
    changes |= {sample(prefix + path) for prefix in ("", VERSION) for route in ROUTES for path in route.paths}

    assert re.findall(r"location ~ (.+?) \{\n(?:(?!    \}\n).+\n)*? +limit_except", NGINX) == [CHANGES]
    for path in changes:
        assert next(pattern for pattern in PATTERNS if re.search(pattern, path)) == CHANGES
