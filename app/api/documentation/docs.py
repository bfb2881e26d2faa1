"""The documentation page, Swagger UI. The gateway serves all of its files."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from litestar import get
from litestar.exceptions import NotFoundException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import Components, Tag
from litestar.params import FromPath
from litestar.types import ASGIApp

from app import __version__
from app.api.answering.responses import FileResponse
from app.api.caller.client_address import is_trusted
from app.api.context import AnyRequest
from app.api.dependencies import worker_of
from app.api.routes import DOCS, SEARCH_DOCS

# Swagger UI's files, with their names in the package offapi.
ASSETS = {"swagger_bundle.js": "text/javascript", "swagger_preset.js": "text/javascript", "swagger_style.css": "text/css"}
_ASSETS_PATH = "/docs-assets"
_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)
TAGS = [
    Tag("detection", "Ask a model about an image, or about several."),
    Tag("text", "Read text."),
    Tag("faces", "Find, describe and compare faces."),
    Tag("vectors", "Describe images and texts by vectors."),
    Tag("analysis", "Ask several models about one image."),
    Tag("search", f"Keep what models say of images, and find them again; off by default. If it is on, its page is {SEARCH_DOCS}."),
    Tag("models", "The models, the names that stand for them, and changes of both, which need API keys."),
    Tag("health", "The state of the gateway and of Triton."),
]


@get(_ASSETS_PATH + "/{name:str}", include_in_schema=False)
async def docs_asset(name: FromPath[str]) -> ASGIApp:
    """Serve one of Swagger UI's files."""
    if name not in ASSETS:
        raise NotFoundException
    spec = find_spec("offapi")  # only its files are needed, so it is not imported
    if spec is None or spec.origin is None:
        raise RuntimeError("the package offapi, which contains Swagger UI, is not installed; run ./just")
    return FileResponse(Path(spec.origin).parent / name, ASSETS[name])


class _Page(SwaggerRenderPlugin):
    def render(self, request: AnyRequest, openapi_schema: dict[str, Any]) -> bytes:
        """Render the page with addresses below the prefix at which a proxy offers the gateway."""
        prefix = _prefix(request)
        page = super().render(request, {**openapi_schema, "servers": [{"url": prefix or "/"}]})
        return page.replace(f'"{_ASSETS_PATH}/'.encode(), f'"{prefix}{_ASSETS_PATH}/'.encode())


class _Document(JsonRenderPlugin):
    def render(self, request: AnyRequest, openapi_schema: dict[str, Any]) -> bytes:
        """Render the document with that prefix."""
        return super().render(request, {**openapi_schema, "servers": [{"url": _prefix(request) or "/"}]})


def _prefix(request: AnyRequest) -> str:
    """Return the path at which a trusted proxy, which removes it, offers the gateway."""
    prefix = request.headers.get("x-forwarded-prefix", "").rstrip("/")
    is_meant = _PREFIX.fullmatch(prefix) and is_trusted(request.scope, worker_of(request).deployment.trusted_proxies)
    return prefix if is_meant else ""


def config(components: Components) -> OpenAPIConfig:
    """Configure the OpenAPI document, with these additional components, and its page."""
    return OpenAPIConfig(
        title="Nereid",
        version=__version__,
        description="Object detection, segmentation, pose estimation and image classification over HTTP: an image goes in, named "
        "objects or classes come out.",
        use_handler_docstrings=True,
        components=components,
        tags=TAGS,
        path=DOCS,
        render_plugins=[
            _Page(
                js_url=f"{_ASSETS_PATH}/swagger_bundle.js",
                css_url=f"{_ASSETS_PATH}/swagger_style.css",
                standalone_preset_js_url=f"{_ASSETS_PATH}/swagger_preset.js",
                favicon='<link rel="icon" href="data:,">',
                path="/",
            ),
            _Document(path="/openapi.json"),
        ],
    )
