"""The settings as a table."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec
from msgspec.structs import FieldInfo

from app.settings.schema import PREFIX, Settings

Kinds = Iterable[tuple[str, type[msgspec.Struct]]]
"""The settings of each feature, and the setting before which they are listed."""


def render(kinds: Kinds) -> str:
    """Render the settings as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for field, meaning in describe(kinds):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f"`{default}`" if default not in {"", None} else ""
        rows.append(f"| `{PREFIX}{field.name.upper()}` | {shown} | {meaning} |")
    return "\n".join(rows)


def describe(kinds: Kinds) -> Iterator[tuple[FieldInfo, str]]:
    """Iterate over all settings, and what they mean, in the order in which they are listed."""
    meanings = _read_docstrings(Settings)
    for field in msgspec.structs.fields(Settings):
        for kind in (kind for before, kind in kinds if before == field.name):
            of_feature = _read_docstrings(kind)
            yield from ((each, of_feature[each.name]) for each in msgspec.structs.fields(kind))
        yield field, meanings[field.name]


def _read_docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Read the docstrings of settings in the source: Python does not keep those of fields."""
    (struct,) = ast.parse(inspect.getsource(kind)).body
    found = {}
    for each in pairwise(ast.iter_child_nodes(struct)):
        match each:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split())
    return found
