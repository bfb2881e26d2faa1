"""OpenAPI descriptions of bodies, parameters and errors, which Litestar cannot derive from the handlers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from app.api.answering.format import media_types_of
from app.api.answering.problems import MEDIA_TYPE
from app.api.answering.schema import Problem
from app.api.caller.check import guard_origin
from app.api.context import STREAM_PATTERN
from app.api.parameters.parse import Parameters
from app.api.parameters.tasks import FORMS
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED
from app.api.routes import ModelRoute
from app.errors import GatewayError
from app.model.heads import Task

_UNDESCRIBED = {401, 403, 499, 501}
"""Errors of keys, which their scheme describes, the status that nobody receives, and that of routes that change models."""


def _describe_errors() -> dict[int, ResponseSpec]:
    titles = {500: ["Internal error"]}
    for error in GatewayError.__subclasses__():
        titles.setdefault(error.status, []).append(error.title)
    return {
        status: ResponseSpec(Problem, description="; ".join(titles[status]), media_type=MEDIA_TYPE, generate_examples=False)
        for status in sorted(titles.keys() - _UNDESCRIBED)
    }


PROBLEMS = _describe_errors()


def describe(status: int, kind: Any, description: str) -> dict[int, ResponseSpec]:  # noqa: ANN401 - any type or union
    """Describe the response with this status."""
    return {status: ResponseSpec(kind, description=description, generate_examples=False)}


KEY_SCHEMES: dict[str, SecurityScheme | Reference] = {
    "bearer": SecurityScheme(
        "http", "An API key, `id.secret`; 401 without a valid one, 403 if its scopes do not suffice.", scheme="bearer"
    ),
    "header": SecurityScheme("apiKey", "The same API key in another header.", name="X-API-Key", security_scheme_in="header"),
}
ADMIN: dict[str, Any] = {
    "guards": [guard_origin],
    "opt": {"scope": "admin"},
    "security": [{name: ["admin"]} for name in KEY_SCHEMES],
    "responses": {status: PROBLEMS[status] for status in (400, 404, 422, 429)},
}

_RAW_TYPES = (
    *(f"image/{name}" for name in ("jpeg", "png", "webp", "bmp", "gif", "avif", "heic", "tiff")),
    "application/octet-stream",
)


def _to_schema(description: dict[str, Any]) -> Schema:
    # msgspec describes `str | None` as anyOf, and an enumeration of strings without a type.
    kind: dict[str, Any] = next((kind for kind in description.get("anyOf", []) if kind.get("type") != "null"), {})
    fields = {"type": "string"} | kind | description
    fields.pop("anyOf", None)
    return Schema(**fields)


def _parameter_schemas(kinds: tuple[type[Parameters], ...]) -> dict[str, Schema]:
    schemas: dict[str, Schema] = {}
    (_, components) = msgspec.json.schema_components(kinds)
    for kind in kinds:
        for name, field in components[kind.__name__]["properties"].items():
            schema = _to_schema(field)
            known = schemas.setdefault(name, schema)
            if known != schema:
                schemas[name] = replace(known, default=None, description=" ".join(map(_with_default, (known, schema))))
    return schemas


def _with_default(schema: Schema) -> str:
    return f"{schema.description}" if schema.default is None else f"{schema.description} Default: {schema.default}."


def binary(media_type: str) -> Schema:
    """Describe a file."""
    return Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY, content_media_type=media_type)


ENCODED = Schema(type=OpenAPIType.STRING, content_encoding="base64", description="The image in base64, or its https address")


def describe_form(fields: dict[str, Schema], required: list[str] | None = None) -> OpenAPIMediaType:
    """Describe a body with these form fields or JSON members."""
    return OpenAPIMediaType(schema=Schema(type=OpenAPIType.OBJECT, properties={**fields}, required=required))


_STREAM = "Name of a camera: a newer image of the same name takes the place of one that waits, whose request gets 409."
STREAM = Parameter("X-Stream", "header", Schema(type=OpenAPIType.STRING, pattern=STREAM_PATTERN), _STREAM, required=False)

DescribeBody = Callable[[dict[str, Schema]], RequestBody]


@dataclass
class ContentOperation(Operation):
    """Adds content to the response, which Litestar cannot derive from the type that the handler returns."""

    contents: ClassVar[Mapping[str, Schema]] = {}

    def __post_init__(self) -> None:
        if self.responses and isinstance(found := self.responses["200"], OpenAPIResponse) and found.content is not None:
            found.content |= {kind: OpenAPIMediaType(schema=schema) for kind, schema in self.contents.items()}


def _describe_image(fields: dict[str, Schema]) -> RequestBody:
    file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream", description="The image")
    return RequestBody(
        required=False,
        description="The image: as it is, as a form field, or in JSON. No body is needed if the query has its `url`.",
        content={
            **{kind: OpenAPIMediaType(schema=binary(kind)) for kind in _RAW_TYPES},
            MULTIPART: describe_form({"image": file, **fields}),
            **dict.fromkeys((JSON, URLENCODED), describe_form({"image": ENCODED, **fields})),
        },
    )


@dataclass
class ImageOperation(ContentOperation):
    """Adds bodies and parameters, which Litestar cannot derive from a handler that takes the raw body."""

    describe_body: ClassVar[DescribeBody] = staticmethod(_describe_image)
    kinds: ClassVar[tuple[type[Parameters], ...]] = ()
    headers: ClassVar[Sequence[Parameter]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        in_path = {parameter.name for parameter in self.parameters or [] if isinstance(parameter, Parameter)}
        fields = {name: schema for name, schema in _parameter_schemas(self.kinds).items() if name not in in_path}
        self.parameters = [
            *(self.parameters or []),
            *(
                Parameter(name=name, param_in="query", schema=schema, description=schema.description, required=False)
                for name, schema in fields.items()
            ),
            *self.headers,
        ]
        self.request_body = type(self).describe_body(fields)


def own_route(  # noqa: PLR0913 - the properties of a route
    path: str,
    handle: Callable[..., object],
    response: object,
    says: str,
    *,
    kinds: tuple[type[Parameters], ...],
    body: DescribeBody = _describe_image,
    also: Mapping[int, str] | None = None,
    contents: Mapping[str, Schema] | None = None,
    has_streams: bool = False,
    **options: Any,  # noqa: ANN401 - those of `ModelRoute`
) -> HTTPRouteHandler:
    """Make a documented route of the gateway's own; `also` says what the same response means with other statuses."""
    handle.__name__ = path.partition("{")[0].strip("/").replace("/", "_")
    own = {"kinds": kinds, "contents": contents or {}, "describe_body": staticmethod(body), "headers": [STREAM] * has_streams}
    operation_class = type("Operation", (ImageOperation,), own)
    responses = {**describe(200, response, says), **PROBLEMS}
    for status, meaning in (also or {}).items():
        responses |= describe(status, response, meaning)
    return ModelRoute(path, operation_class=operation_class, responses=responses, has_streams=has_streams, **options)(handle)


def pictures_of(*tasks: Task) -> dict[str, Schema]:
    """Describe the pictures that can be the response of routes for models of these tasks."""
    return {kind: binary(kind) for task in tasks for kind in media_types_of(FORMS[task].formats) if kind != JSON}


def with_contents(contents: dict[str, Schema]) -> type[ContentOperation]:
    """Return the operation of routes whose response can also have these contents."""
    return type("Operation", (ContentOperation,), {"contents": contents})
