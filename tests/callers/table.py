"""The table of clients in the documentation."""

import re
from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

from tests.support import ROOT

PAGE = ROOT / "docs" / "reference" / "clients.md"
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=\n<!-- end -->)", re.DOTALL)


class Row(NamedTuple):
    """What was done with a version of a client."""

    client: str
    version: str
    done: str
    result: str


def render(rows: Iterable[Row]) -> str:
    """Format rows as Markdown."""
    lines = [("client", "version", "what was done", "result"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(rows: Iterable[Row], day: date) -> None:
    """Replace the table of the page, and its date."""
    text = PAGE.read_text(encoding="utf-8")
    text, count = _TABLE.subn(f"Run on {day.isoformat()}:\n\n{render(rows)}".replace("\\", r"\\"), text)
    assert count == 1
    PAGE.write_text(text, encoding="utf-8")


def read() -> list[Row]:
    found = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in found[0].splitlines()[4:]]
