"""The workflow of GitHub Actions, which cannot be run here."""

import subprocess
import sys

import pytest

from tests.deploy.needs import load
from tests.support import ROOT

FILE = ROOT / ".github" / "workflows" / "ci.yml"
WORKFLOW = load(FILE)


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_the_file_is_valid(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_the_workflow_runs_the_script_that_runs_elsewhere() -> None:
    """Nothing is checked on GitHub only."""
    (job,) = WORKFLOW["jobs"].values()

    assert job["steps"][-1]["run"] == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_the_workflow_can_change_nothing_in_the_repository() -> None:
    """Requests from forks run their own code."""
    (job,) = WORKFLOW["jobs"].values()

    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in job
    assert [step["with"]["persist-credentials"] for step in job["steps"] if "checkout" in step.get("uses", "")] == [False]
