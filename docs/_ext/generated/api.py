"""The routes and the schemas of responses, from the OpenAPI document and the types behind it."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from sphinx.pycode import ModuleAnalyzer

from generated.markdown import define, type_of
from tests.tools import openapi

_PROBLEM = "application/problem+json"
_OWN_PAGE = {"GpuDevice", "GpuHealth", "Health", "LimitsInForce", "ReadinessReport", "SearchHealth", "ServerHealth", "State"}
"""Schemas that another page describes."""

_ANCHOR = str.maketrans(" ", "-", "/{}")

_document = cache(openapi.document)


def render_operations() -> str:
    """Describe all routes, in the order of the document."""
    described: dict[str, str] = {}
    return "\n".join(
        _describe(f"{method.upper()} {path}", operation, described)
        for path, item in _document()["paths"].items()
        for method, operation in item.items()
    )


def _describe(name: str, operation: dict[str, Any], described: dict[str, str]) -> str:
    """Describe an operation; `described` has the operation at which each parameter was already described."""
    parameters = operation.get("parameters", [])
    parts = [f"### {name}\n", operation.get("description", f"{operation['summary']}.") + "\n"]
    if "security" in operation:
        scope = operation["security"][0]["bearer"][0]
        parts.append(f"An API key needs the scope `{scope}`.\n")
    if parameters:
        parts += ["**Parameters**\n", *_describe_parameters(name, parameters, described)]
    if "requestBody" in operation:
        parts += ["**Body**\n", *_describe_body(operation["requestBody"], {each["name"] for each in parameters})]
    return "\n".join([*parts, "**Responses**\n", _describe_responses(operation["responses"])])


def _describe_parameters(name: str, parameters: list[dict[str, Any]], described: dict[str, str]) -> list[str]:
    texts = {parameter["name"]: _describe_parameter(parameter) for parameter in parameters}
    parts = [text for text in texts.values() if text not in described]
    for other in dict.fromkeys(described[text] for text in texts.values() if text in described):
        same = ", ".join(f"`{parameter}`" for parameter, text in texts.items() if described.get(text) == other)
        parts.append(f"As for [{other}](#{other.lower().translate(_ANCHOR)}): {same}\n")
    described |= {text: name for text in texts.values() if text not in described}
    return parts


def _describe_parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    remarks = ["in the path" if parameter["in"] == "path" else type_of(schema)]
    if "default" in schema:
        remarks.append(f"default `{msgspec.json.encode(schema['default']).decode().strip(chr(34))}`")
    text = parameter.get("description", "Name of the model.")
    return define(parameter["name"], "; ".join(remarks), text)


def _describe_body(body: dict[str, Any], parameters: set[str]) -> list[str]:
    parts = [f"{body['description']}\n"] if "description" in body else []
    by_text: dict[str, list[str]] = {}
    for kind, content in body["content"].items():
        by_text.setdefault(_describe_content(content["schema"], parameters), []).append(f"`{kind}`")
    parts += [f"- {', '.join(kinds)}: {text}" for text, kinds in by_text.items()]
    return [*parts, ""]


def _describe_content(schema: dict[str, Any], parameters: set[str]) -> str:
    fields = schema.get("properties")
    if fields is None:
        return "the file itself" if "contentMediaType" in schema else type_of(schema)
    own = ", ".join(f"`{name}` ({type_of(field)})" for name, field in fields.items() if name not in parameters)
    return f"{own}, and parameters" if parameters & fields.keys() else own


def _describe_responses(responses: dict[str, Any]) -> str:
    lines, problems = [], []
    for status, response in responses.items():
        own: dict[str, list[str]] = {}
        for kind, content in response.get("content", {}).items():
            if kind != _PROBLEM:
                own.setdefault(type_of(content["schema"]), []).append(f"`{kind}`")
        if own or int(status) < 400:  # noqa: PLR2004
            texts = [f"{text} as {', '.join(kinds)}" for text, kinds in own.items()]
            lines.append(f"- **{status}**: {'; '.join(texts) or 'no body'}")
        else:
            problems.append(status)
    if problems:
        lines.append(f"- **{', '.join(problems)}**: [Problem](#schema-problem) as `{_PROBLEM}`; see [errors](errors.md)")
    return "\n".join(lines) + "\n"


def render_schemas(*names: str) -> str:
    """Describe these schemas, or all that have no other page, with the comments of their fields."""
    schemas = _document()["components"]["schemas"]
    types = {
        kind.__name__: kind
        for kind in _derived(msgspec.Struct)
        if kind.__module__.startswith(("app.api.", "app.routing.", "app.search."))
    }
    return "\n".join(_describe_schema(types[name], schemas[name]) for name in names or sorted(schemas.keys() - _OWN_PAGE))


def _derived(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _derived(each)


def _describe_schema(kind: type[msgspec.Struct], schema: dict[str, Any]) -> str:
    comments = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
    parts = [f"(schema-{kind.__name__.lower()})=\n### {kind.__name__}\n", f"{inspect.getdoc(kind)}\n"]
    for field in msgspec.structs.fields(kind):
        comment = " ".join(comments.get((kind.__name__, field.name), [])).strip()
        remark = "" if field.encode_name in schema["required"] else "; optional"
        entry = f"- `{field.encode_name}` ({type_of(schema['properties'][field.encode_name])}{remark})"
        parts.append(f"{entry}: {comment}" if comment else entry)
    return "\n".join([*parts, ""])
