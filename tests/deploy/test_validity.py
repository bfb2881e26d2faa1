"""What the programs that read the shipped files say of them, without running what they describe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.deploy.compose import PROJECTS
from tests.deploy.needs import DEPLOY, load
from tests.deploy.test_prometheus import promtool
from tests.deploy.units import MODELS, UNITS
from tests.nginx import prepare
from tests.programs import require_program
from tests.support import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def output(*command: str | Path, **environment: str) -> tuple[int, str]:
    """Run a program in `deploy`; return its exit code, and what it says."""
    done = subprocess.run(command, cwd=DEPLOY, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("schema", ["compose-spec", "github-workflows", "github-workflows-require-timeout"])
def test_files_fit_their_schemas(schema: str, tmp_path: Path) -> None:
    files = [WORKFLOW]
    if schema == "compose-spec":
        files = [*DEPLOY.glob("compose*.yaml"), DEPLOY / "stack.yaml", *(tmp_path / f"{name}.json" for name in PROJECTS)]
        for path in files[-len(PROJECTS) :]:
            path.write_bytes(msgspec.json.encode(PROJECTS[path.stem]))
    kind = "custom" if schema.endswith("timeout") else "vendor"
    code, said = output(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"{kind}.{schema}", *files)

    assert code == 0, said


def test_workflow_runs_the_script_that_runs_elsewhere_and_can_change_nothing() -> None:
    """Requests from forks run their own code."""
    workflow = load(WORKFLOW)
    (job,) = workflow["jobs"].values()

    assert job["steps"][-1]["run"] == ".ci/run"
    assert (workflow["permissions"], "permissions" in job) == ({"contents": "read"}, False)
    assert [step["with"]["persist-credentials"] for step in job["steps"] if "checkout" in step.get("uses", "")] == [False]


@pytest.mark.system
def test_docker_accepts_the_stack_and_ignores_nothing() -> None:
    """Its command line checks a stack, and names what it does not support, before it looks for an engine."""
    nowhere = "unix:///nowhere/docker.sock"
    command = [require_program("docker", "docker-cli"), "stack", "deploy", "--detach", "--compose-file=stack.yaml", "nereid"]
    _, said = output(*command, DOCKER_HOST=nowhere)

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
@pytest.mark.parametrize("server", ["unix:/run/nereid-1.sock", "127.0.0.1:1"])
def test_nginx_accepts_the_files(server: str, tmp_path: Path) -> None:
    """Without a complaint; from 1.25.1 on it prefers another way to write `http2`."""
    said = prepare([server] * 3, tmp_path).check().splitlines()

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
