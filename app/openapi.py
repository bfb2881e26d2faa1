"""The OpenAPI document and the page that shows it, both served by us."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from litestar import get
from litestar.exceptions import NotFoundException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import OpenAPIFormat, OpenAPIMediaType, OpenAPIType, Operation, Parameter, RequestBody, Schema
from litestar.params import FromPath
from litestar.response import File

from app import __version__
from app.parameters import Parameters
from app.problems import MEDIA_TYPE
from app.schema import Problem

_ERRORS = {
    400: "Malformed request or parameter, or an empty body",
    404: "No such model",
    413: "Too many bytes, or too many pixels by the picture's own header",
    415: "Not a content type or picture format that is read",
    422: "The picture cannot be decoded, or its sides are out of range",
    500: "A failure of the gateway",
    502: "The model answered nonsense",
    503: "Triton or the model is not available; see Retry-After",
    504: "The deadline passed",
}
PROBLEMS = {
    status: ResponseSpec(Problem, description=text, media_type=MEDIA_TYPE, generate_examples=False)
    for status, text in _ERRORS.items()
}

UNAVAILABLE = {503: PROBLEMS[503]}

_PICTURE = "image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif", "application/octet-stream"


def _schema(description: dict[str, Any]) -> Schema:
    """Translate the part of JSON Schema that msgspec writes for `Parameters`."""
    # `str | None` is written as anyOf, an enumeration of strings without any type.
    kinds = [kind["type"] for kind in description.get("anyOf", []) if kind["type"] != "null"] or ["string"]
    return Schema(
        type=OpenAPIType(description.get("type", kinds[0])),
        enum=description.get("enum"),
        minimum=description.get("minimum"),
        maximum=description.get("maximum"),
        default=description.get("default"),
        description=description.get("description"),
    )


def _fields() -> dict[str, Schema]:
    (_, components) = msgspec.json.schema_components([Parameters])
    return {name: _schema(field) for name, field in components["Parameters"]["properties"].items()}


@dataclass
class DetectOperation(Operation):
    """What Litestar cannot see in a handler that takes the raw body: bodies and parameters."""

    def __post_init__(self) -> None:
        """Add them to what was found."""
        fields = _fields()
        in_path = {parameter.name for parameter in self.parameters or [] if isinstance(parameter, Parameter)}
        self.parameters = [
            *(self.parameters or []),
            *(
                Parameter(name=name, param_in="query", schema=schema, description=schema.description, required=False)
                for name, schema in fields.items()
                if name not in in_path
            ),
        ]
        file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream", description="The picture")
        encoded = Schema(type=OpenAPIType.STRING, content_encoding="base64", description="The picture, base64")
        beside = {name: schema for name, schema in fields.items() if name not in in_path}
        raw = {
            kind: OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY, content_media_type=kind))
            for kind in _PICTURE
        }
        self.request_body = RequestBody(
            required=True,
            description="The picture: as it is, as a form field, or in JSON.",
            content={
                **raw,
                "multipart/form-data": OpenAPIMediaType(
                    schema=Schema(type=OpenAPIType.OBJECT, properties={"image": file, **beside}, required=["image"])
                ),
                "application/json": OpenAPIMediaType(
                    schema=Schema(type=OpenAPIType.OBJECT, properties={"image": encoded, **beside}, required=["image"])
                ),
            },
        )


# Swagger UI's own files, under the names a Python package ships them.
_ASSETS = {"swagger_bundle.js": "text/javascript", "swagger_preset.js": "text/javascript", "swagger_style.css": "text/css"}
_ASSETS_PATH = "/docs-assets"


def _assets_folder() -> Path:
    spec = find_spec("offapi")  # found, not imported: its code is not needed
    if spec is None or spec.origin is None:
        raise RuntimeError("the package offapi, which brings Swagger UI, is not installed; run ./just")
    return Path(spec.origin).parent


@get(_ASSETS_PATH + "/{name:str}", include_in_schema=False)
async def docs_asset(name: FromPath[str]) -> File:
    """Serve one of Swagger UI's files."""
    if name not in _ASSETS:
        raise NotFoundException
    return File(_assets_folder() / name, media_type=_ASSETS[name], content_disposition_type="inline")


def config() -> OpenAPIConfig:
    """Describe the API."""
    return OpenAPIConfig(
        title="Nereid",
        version=__version__,
        description="Object detection over HTTP: a picture goes in, named boxes come out.",
        use_handler_docstrings=True,
        path="/docs",
        render_plugins=[
            SwaggerRenderPlugin(
                js_url=f"{_ASSETS_PATH}/swagger_bundle.js",
                css_url=f"{_ASSETS_PATH}/swagger_style.css",
                standalone_preset_js_url=f"{_ASSETS_PATH}/swagger_preset.js",
                favicon='<link rel="icon" href="data:,">',
                path="/",
            ),
            JsonRenderPlugin(path="/openapi.json"),
        ],
    )
