"""The settings as a table."""

import ast
import inspect
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import msgspec
from msgspec.structs import FieldInfo

from app.settings.schema import PREFIX, Settings

Kinds = Sequence[tuple[type[msgspec.Struct], str]]
"""The settings of features, each with the setting before which they are listed."""


def render(kinds: Kinds) -> str:
    """Render the settings as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for field, meaning in describe(kinds):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f"`{default}`" if default not in {"", None} else ""
        rows.append(f"| `{PREFIX}{field.name.upper()}` | {shown} | {meaning} |")
    return "\n".join(rows)


def describe(kinds: Kinds) -> Iterator[tuple[FieldInfo, str]]:
    """Iterate over the settings and their docstrings, which are in the source only: Python does not keep those of fields."""
    structs: list[type[msgspec.Struct]] = [Settings, *(kind for kind, _ in kinds)]
    meanings = {}
    for pair in chain.from_iterable(map(_statements, structs)):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                meanings[name] = " ".join(text.split())
    for field in msgspec.structs.fields(Settings):
        listed = (msgspec.structs.fields(kind) for kind, before in kinds if before == field.name)
        yield from ((each, meanings[each.name]) for each in (*chain.from_iterable(listed), field))


def _statements(kind: type[msgspec.Struct]) -> Iterator[tuple[ast.AST, ast.AST]]:
    (struct,) = ast.parse(inspect.getsource(kind)).body
    return pairwise(ast.iter_child_nodes(struct))
