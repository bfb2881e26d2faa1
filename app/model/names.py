"""Class names in the forms in which exporters and people write them."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# `names:` of a data.yaml, with what follows it on its line (1) and on those that are indented or begin with a dash (2).
_YAML = re.compile(r"^names:[ \t]*(.*)\n?((?:[ \t]*-.*\n?|[ \t]+\S.*\n?)*)", re.MULTILINE)
# A list or mapping of YAML in brackets, perhaps on several lines.
_FLOW = re.compile(r"\s*[\[{](.*?)[\]}][ \t]*(?:#[^\n]*)?$", re.DOTALL | re.MULTILINE)
_MAX_ID = 100_000
_ENTRY = re.compile(r"\s*-\s+(.+)|\s*['\"]?(\d+)['\"]?(?:\s*:\s+|\s+)(\S.*)")


def read_literal(text: str) -> Any:  # noqa: ANN401
    """Return the value of a literal of Python or JSON; the text itself if it is none."""
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def order_names(names: object) -> tuple[str, ...]:
    """Return the names in a list, or in a mapping from ids, which may be texts and begin with 1; empty for anything else."""
    if isinstance(names, list | tuple):
        return tuple(map(str, names)) if all(isinstance(name, str | int | float) for name in names) else ()
    if not isinstance(names, Mapping) or not all(re.fullmatch(r"\d{1,5}", str(key)) for key in names):
        return ()
    by_id = {int(key): str(name) for key, name in names.items()}
    first = min(by_id, default=0)
    return tuple(by_id[key] for key in sorted(by_id)) if sorted(by_id) == [*range(first, first + len(by_id))] and first <= 1 else ()


def parse_names(text: str) -> tuple[str, ...]:
    """Read names from a text: JSON, a data.yaml, or a line for each name, perhaps after its id; empty for JSON of another form."""
    if text.lstrip().startswith(("[", "{")) and not isinstance(literal := read_literal(text.strip()), str):
        return tuple(map(str.strip, order_names(literal)))
    if yaml := _YAML.search(text):
        flow = _FLOW.match(text, yaml.start(1))
        parts = [*filter(None, re.split(r"\s*,\s*", re.sub(r" #.*", "", flow[1]).strip()))] if flow else yaml[2].splitlines()
        return _from_entries(parts) or tuple(map(_unquote, parts))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    entries = _from_entries(lines) if lines and not lines[0].startswith("-") else ()
    # Names may begin with numbers, too: "1 Euro", "2 Euro".
    is_repeating = 2 * (len(entries) - len({*entries})) >= len(lines)
    return entries if len(entries) >= len(lines) and not is_repeating else tuple(lines)


def _from_entries(lines: list[str]) -> tuple[str, ...]:
    matches = [match for line in lines if (match := _ENTRY.fullmatch(line))]
    listed = [_unquote(match[1]) for match in matches if match[1]]
    by_id = {int(match[2]): _unquote(match[3]) for match in matches if match[2]}
    if len(listed) == len(lines):
        return tuple(listed)
    if len(by_id) != len(lines) or max(by_id, default=0) > _MAX_ID:
        return ()
    # Ids without a name are named by themselves, as in answers.
    return order_names(by_id) or tuple(by_id.get(index, str(index)) for index in range(max(by_id) + 1))


def _unquote(name: str) -> str:
    return name.strip().strip("'\"")
