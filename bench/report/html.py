"""HTML elements as text."""

from collections.abc import Sequence
from html import escape

from bench.report.text import number


def section(title: str, description: str, content: str) -> str:
    """Make a section; `content` is HTML, the other arguments are text."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(description)}</p>{content}</section>\n"


def table(head: Sequence[str], rows: Sequence[str]) -> str:
    """Make a table of rows made by `row`."""
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(name: str, model: str, values: Sequence[tuple[float | None, bool]], note: str = "") -> str:
    """Make a row of a table: a name, its model, and numbers with whether each is bad."""
    cells = "".join(f"<td{' class=bad' if is_bad else ''}>{number(value)}</td>" for value, is_bad in values)
    return f'<tr><td title="{escape(note)}">{escape(name)}</td><td>{escape(model)}</td>{cells}</tr>'
