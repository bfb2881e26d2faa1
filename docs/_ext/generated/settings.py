"""The settings, from their types and docstrings."""

import msgspec

from app import feature
from app.settings import table
from app.settings.schema import PREFIX
from generated.markdown import define, type_of

_SECTIONS = {
    "host": "Addresses and access",
    "workers": "Processes",
    "model": "Models and Triton",
    "timeout_seconds": "Limits",
    "log_level": "Log, page and other interfaces",
    "search": "Search",
    "tracing": "Traces",
}
"""Titles of sections, by their first setting."""


def render() -> str:
    """Describe all settings, in the order of their definition."""
    described = msgspec.json.schema_components([feature.settings_kind()])[1]["AllSettings"]["properties"]
    if unknown := _SECTIONS.keys() - described.keys():
        raise ValueError(f"there are no settings {unknown}")
    parts = []
    for info, meaning in table.describe(feature.kinds()):
        field, schema = info.name, described[info.name]
        if field in _SECTIONS:
            parts.append(f"## {_SECTIONS[field]}\n")
        kind = type_of({"anyOf": [each for each in schema["anyOf"] if each["type"] != "null"]} if "anyOf" in schema else schema)
        default = schema["default"]
        written = str(default).lower() if isinstance(default, bool) else str(default)
        remark = kind if default in {"", None} else f"{kind}; default `{written}`"
        name = PREFIX + field.upper()
        parts.append(define(name, remark, meaning, anchor=name.lower().replace("_", "-")))
    return "\n".join(parts)
