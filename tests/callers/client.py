"""The environments of the programs, what of them runs there, and the table of them in the documentation."""

import json
import re
import subprocess
from collections.abc import Iterable
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.environments import Environment
from tests.support import ROOT

_PAGE = ROOT / "docs" / "reference" / "clients.md"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- end -->)", re.DOTALL)
_SECONDS = 300


@cache
def environment(name: str) -> Environment:
    made = Environment(f"clients/{name}", "./just clients")
    made.install()
    return made


@cache
def pins() -> dict[str, str]:
    """Return the pinned version of each client: the first package of each file in requirements/clients; others are its needs."""
    versions: dict[str, str] = {}
    for wanted in (ROOT / "requirements" / "clients").glob("*.in"):
        locked = dict(re.findall(r"^(\S+)==(\S+)", wanted.with_suffix(".txt").read_text(encoding="utf-8"), re.MULTILINE))
        name = wanted.read_text(encoding="utf-8").split()[0]
        versions[name] = locked[name]
    return versions


def run(name: str, program: str, *arguments: str) -> Any:  # noqa: ANN401
    """Run programs/PROGRAM.py with the Python of a client's environment; return the JSON that it prints last."""
    command = [str(environment(name).python()), str(Path(__file__).parent / "programs" / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class Row(NamedTuple):
    client: str
    version: str
    done: str
    result: str


def render(rows: Iterable[Row]) -> str:
    lines = [("client", "version", "what was done", "result"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(rows: Iterable[Row], day: date) -> None:
    text = _PAGE.read_text(encoding="utf-8")
    text, count = _TABLE.subn(f"Run on {day.isoformat()}:\n\n{render(rows)}".replace("\\", r"\\"), text)
    assert count == 1
    _PAGE.write_text(text, encoding="utf-8")


def read() -> list[Row]:
    found = _TABLE.search(_PAGE.read_text(encoding="utf-8"))
    assert found
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in found[0].splitlines()[4:]]
