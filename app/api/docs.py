"""The documentation page, Swagger UI, with every file served from here."""

from importlib.util import find_spec
from pathlib import Path

from litestar import get
from litestar.exceptions import NotFoundException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, SwaggerRenderPlugin
from litestar.openapi.spec import Components
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from app import __version__

# Swagger UI's own files, under the names the package offapi gives them.
ASSETS = {"swagger_bundle.js": "text/javascript", "swagger_preset.js": "text/javascript", "swagger_style.css": "text/css"}
_ASSETS_PATH = "/docs-assets"


@get(_ASSETS_PATH + "/{name:str}", include_in_schema=False)
async def docs_asset(name: FromPath[str]) -> ASGIApp:
    """Serve one of Swagger UI's files."""
    if name not in ASSETS:
        raise NotFoundException
    return _FileResponse(_assets_folder() / name, ASSETS[name])


class _FileResponse:
    """Sends a file. The server reads it piece by piece if it can: a client that does not read it costs no memory."""

    def __init__(self, path: Path, media_type: str) -> None:
        self._path = path
        self._media_type = media_type

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        headers = [(b"content-type", self._media_type.encode()), (b"content-length", b"%d" % self._path.stat().st_size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if "http.response.pathsend" in (scope.get("extensions") or {}):
            await send({"type": "http.response.pathsend", "path": str(self._path)})  # type: ignore[arg-type]  # an extension
        else:
            await send({"type": "http.response.body", "body": self._path.read_bytes(), "more_body": False})


def config(components: Components) -> OpenAPIConfig:
    """Configure the OpenAPI document, with these components beside those of the handlers, and its page."""
    return OpenAPIConfig(
        title="Nereid",
        version=__version__,
        description="Object detection and image classification over HTTP: an image goes in, named boxes or classes come out.",
        use_handler_docstrings=True,
        components=components,
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


def _assets_folder() -> Path:
    spec = find_spec("offapi")  # located, not imported: only its files are needed
    if spec is None or spec.origin is None:
        raise RuntimeError("the package offapi, which contains Swagger UI, is not installed; run ./just")
    return Path(spec.origin).parent
