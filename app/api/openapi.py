"""What the OpenAPI document says of detection and of errors, which Litestar cannot derive from the handlers."""

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from app.api.parameters import Parameters
from app.api.problems import MEDIA_TYPE
from app.api.schema import Problem

_ERRORS = {
    400: "Malformed request or parameter, an empty body, or an address that images are not fetched from",
    404: "Unknown model",
    408: "The body arrives too slowly",
    413: "Too many bytes, or too many pixels according to the image's header",
    415: "Unsupported content type or image format",
    422: "The image cannot be decoded, or its dimensions are out of range",
    424: "The host of the image did not deliver it",
    429: "The gateway is full; see Retry-After",
    500: "Internal error of the gateway",
    502: "The model returned an invalid output",
    503: "Triton or the model is not available; see Retry-After",
    504: "The deadline passed",
}
PROBLEMS = {
    status: ResponseSpec(Problem, description=text, media_type=MEDIA_TYPE, generate_examples=False)
    for status, text in _ERRORS.items()
}

UNAVAILABLE = {503: PROBLEMS[503]}

KEY_SCHEMES: dict[str, SecurityScheme | Reference] = {
    "bearer": SecurityScheme(
        "http", "An API key, `id.secret`; 401 without a valid one, 403 if its scopes do not suffice.", scheme="bearer"
    ),
    "header": SecurityScheme("apiKey", "The same API key in another header.", name="X-API-Key", security_scheme_in="header"),
}
"""The two ways to send an API key."""

_RAW_TYPES = "image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif", "application/octet-stream"


def _to_schema(description: dict[str, Any]) -> Schema:
    """Translate the part of JSON Schema that msgspec writes for `Parameters`."""
    # `str | None` is written as anyOf, and an enumeration of strings without any type.
    kinds = [kind["type"] for kind in description.get("anyOf", []) if kind["type"] != "null"] or ["string"]
    return Schema(
        type=OpenAPIType(description.get("type", kinds[0])),
        enum=description.get("enum"),
        minimum=description.get("minimum"),
        maximum=description.get("maximum"),
        default=description.get("default"),
        description=description.get("description"),
    )


def _parameter_schemas() -> dict[str, Schema]:
    (_, components) = msgspec.json.schema_components([Parameters])
    return {name: _to_schema(field) for name, field in components["Parameters"]["properties"].items()}


@dataclass
class DetectOperation(Operation):
    """Adds what Litestar cannot see in a handler that takes the raw body: bodies and parameters."""

    def __post_init__(self) -> None:
        """Complete the operation that Litestar has made."""
        in_path = {parameter.name for parameter in self.parameters or [] if isinstance(parameter, Parameter)}
        fields = {name: schema for name, schema in _parameter_schemas().items() if name not in in_path}
        self.parameters = [
            *(self.parameters or []),
            *(
                Parameter(name=name, param_in="query", schema=schema, description=schema.description, required=False)
                for name, schema in fields.items()
            ),
        ]
        file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream", description="The image")
        encoded = Schema(
            type=OpenAPIType.STRING, content_encoding="base64", description="The image in base64, or its https address"
        )
        raw = {
            kind: OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY, content_media_type=kind))
            for kind in _RAW_TYPES
        }
        self.request_body = RequestBody(
            required=False,
            description="The image: as it is, as a form field, or in JSON. No body is needed if the query has its `url`.",
            content={
                **raw,
                "multipart/form-data": OpenAPIMediaType(
                    schema=Schema(type=OpenAPIType.OBJECT, properties={"image": file, **fields})
                ),
                "application/json": OpenAPIMediaType(
                    schema=Schema(type=OpenAPIType.OBJECT, properties={"image": encoded, **fields})
                ),
            },
        )
