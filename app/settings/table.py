"""The settings as a table."""

import typing

import msgspec
from msgspec import Meta

from app.settings.schema import PREFIX, Settings


def render() -> str:
    """Render the settings as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(Settings):
        meta = next(m for m in reversed(typing.get_args(field.type)) if isinstance(m, Meta) and m.description)
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = f"`{default}`" if default not in {"", None} else ""
        rows.append(f"| `{PREFIX}{field.name.upper()}` | {shown} | {meta.description} |")
    return "\n".join(rows)
