"""The settings as a table."""

import ast
import inspect
from itertools import pairwise

import msgspec

from app.settings.schema import PREFIX, Settings


def render() -> str:
    """Render the settings as a Markdown table."""
    rows, meanings = ["| variable | default | meaning |", "|---|---|---|"], read_docstrings()
    for field in msgspec.structs.fields(Settings):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f"`{default}`" if default not in {"", None} else ""
        rows.append(f"| `{PREFIX}{field.name.upper()}` | {shown} | {meanings[field.name]} |")
    return "\n".join(rows)


def read_docstrings() -> dict[str, str]:
    """Read the docstrings of the settings in the source: Python does not keep those of fields."""
    (struct,) = ast.parse(inspect.getsource(Settings)).body
    found = {}
    for each in pairwise(ast.iter_child_nodes(struct)):
        match each:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split())
    return found
