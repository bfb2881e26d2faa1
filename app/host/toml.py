"""Write TOML, which the standard library only reads."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump(content: Mapping[str, Any], *title: str) -> str:
    """Return a TOML table with its subtables, without values that are None; JSON's numbers, strings and arrays are also TOML's."""
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    lines = [
        f"{_key(name)} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in content.items()
        if value is not None and name not in tables
    ]
    if title:
        lines.insert(0, f"[{'.'.join(map(_key, title))}]\n")
    return "\n".join(["".join(lines), *(dump(table, *title, name) for name, table in tables.items())])


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)
