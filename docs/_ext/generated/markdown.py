"""Markdown of definitions and types."""

from typing import Any

_UNLIMITED = 2**53
"""Limits from here on only say which numbers can be represented."""


def define(name: str, remark: str, text: str, anchor: str = "") -> str:
    """Write a definition list with one entry: a name in code, a remark in parentheses, and a text."""
    term = f"[`{name}`]{{#{anchor}}}" if anchor else f"`{name}`"
    indented = text.replace("\n", "\n  ")
    return f"{term}{f' ({remark})' if remark else ''}\n: {indented or '—'}\n"


def sentence(text: str) -> str:
    """Write a text, such as the help of an option, as a sentence."""
    text = " ".join(text.split())
    first = text[:1].upper() if text[:2].islower() else text[:1]  # not of gRPC
    return first + text[1:] + ("" if text.endswith(".") else ".")


def type_of(schema: dict[str, Any]) -> str:  # noqa: PLR0911 - one for each form of a type
    """Describe a JSON Schema in words; names of components are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#schema-{name.lower()})"
    if kinds := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(map(type_of, kinds))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])} {type_of(schema['prefixItems'][0])}s"
        return f"list of {type_of(schema['items'])}"
    if kind == "object" and schema.get("additionalProperties"):
        return f"object whose values are {type_of(schema['additionalProperties'])}"
    if schema.get("contentEncoding") == "base64":
        return "string in base64"
    if "contentMediaType" in schema:
        return "file"
    return ", ".join([kind, *_limits(schema)])


def _limits(schema: dict[str, Any]) -> list[str]:
    low, high, above = schema.get("minimum"), schema.get("maximum", _UNLIMITED), schema.get("exclusiveMinimum")
    if above is not None:
        return [f"more than {above:g}", f"at most {high:g}"]
    if low is not None:
        return [f"{low:g} to {high:.10g}" if high < _UNLIMITED else f"at least {low:g}"]
    return []
