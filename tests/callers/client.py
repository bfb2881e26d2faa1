"""The environments of the programs, and what of them runs there."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.environments import Environment
from tests.support import ROOT

PROGRAMS = Path(__file__).parent / "programs"
_REQUIREMENTS = ROOT / "requirements" / "clients"
_SECONDS = 300
"""A program may take this long."""


@cache
def environment(name: str) -> Environment:
    """Return the environment of a client, created from requirements/clients/NAME.txt if necessary."""
    made = Environment(f"clients/{name}", "./just clients")
    made.install()
    return made


@cache
def pins() -> dict[str, str]:
    """Return the pinned version of each client: the first package of each file in requirements/clients; others are its needs."""
    versions: dict[str, str] = {}
    for wanted in _REQUIREMENTS.glob("*.in"):
        locked = dict(re.findall(r"^(\S+)==(\S+)", wanted.with_suffix(".txt").read_text(encoding="utf-8"), re.MULTILINE))
        name = wanted.read_text(encoding="utf-8").split()[0]
        versions[name] = locked[name]
    return versions


def run(name: str, program: str, *arguments: str) -> Any:  # noqa: ANN401
    """Run programs/PROGRAM.py with the Python of a client's environment; return the JSON that it prints last."""
    command = [str(environment(name).python()), str(PROGRAMS / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
