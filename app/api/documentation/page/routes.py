"""GET /: the page for browsers, or a description of the service for programs; and the files of the page."""

from functools import cache
from pathlib import Path
from typing import Any

from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.openapi.spec import OpenAPIType, Schema
from litestar.params import FromPath
from litestar.types import ASGIApp

from app import __version__
from app.api.answering.format import best
from app.api.answering.responses import FileResponse
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import describe, with_contents
from app.api.receiving.content_type import JSON
from app.api.routes import API_VERSION
from app.model.heads import HEADS, TASKS, ClassificationHead, EmbeddingHead, TextDetectionHead, TextRecognitionHead

HTML = "text/html"
FOLDER = Path(__file__).parent / "files"
ASSETS = {
    "page.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("page.js", "drawing.js", "gateway.js", "panels.js", "search.js", "shrink.js", "snippets.js", "sources.js"),
        "text/javascript; charset=utf-8",
    ),
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(("astronaut.jpg", "chelsea.jpg", "coffee.jpg"), "image/jpeg"),
}

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_NOSNIFF = (b"x-content-type-options", b"nosniff")
# Browsers revalidate code on each visit, so that its files have the same version after an upgrade.
_CACHE_CODE, _CACHE_IMAGES = (b"cache-control", b"no-cache"), (b"cache-control", b"max-age=86400")
_ENDPOINTS: dict[str, str] = {
    **{task: head.route for task, head in HEADS.items()},
    ClassificationHead.task: ClassificationHead.route,
    **{head.task: head.route for head in (TextDetectionHead, TextRecognitionHead, EmbeddingHead)},
    "faces": "/faces/detect",
    "analysis": "/analyze",
    "batch": "/detect/batch",
    "prediction": "/predict/{model}",
    "models": "/models",
    "routes": "/routes",
}
_SEARCH_ENDPOINTS = {
    "ingest": "/ingest",
    "search": "/search/image",
    "text_search": "/search/ocr",
    "face_search": "/faces/search",
    "indexes": "/query/stats",
}
_REPORTS = {
    "health": "/health",
    "liveness": "/livez",
    "readiness": "/readyz",
    "metrics": "/metrics",
    "documentation": "/docs",
}


@get(
    "/",
    summary="The service, or a page to try it",
    operation_class=with_contents({HTML: Schema(type=OpenAPIType.STRING, description="A page to try the service, if it is on")}),
    responses=describe(200, dict[str, Any], "The service"),
)
async def root(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> Response[Any]:
    """Describe the service. Browsers, which accept `text/html`, get a page to try it."""
    if worker.deployment.has_page and best(context_of(request.scope).accept, (JSON, HTML)) == HTML:
        return Response(_page(), media_type=HTML, headers={"Vary": "Accept", **_SECURITY})
    spec = pipeline.tritons.cached(pipeline.default_reference)
    description = {
        "service": "Nereid",
        "status": "running",
        "version": __version__,
        "api_version": API_VERSION,
        "api_versions": {"current": API_VERSION, "supported": [API_VERSION], "deprecated": []},
        "endpoints": _endpoints(worker),
        "models": {task: pipeline.default_for(task) for task in TASKS},
        "backend": {"name": "triton", "gpu_available": spec is not None and spec.device == "gpu"},
    }
    return Response(description, media_type=JSON, headers={"Vary": "Accept"})


def _endpoints(worker: WorkerResources) -> dict[str, str]:
    has_search, deployment = worker.search is not None, worker.deployment
    return {
        **({} if deployment.is_search_alone else _ENDPOINTS),
        **(_SEARCH_ENDPOINTS if has_search else {}),
        **({"thumbnails": "/query/image/{image_id}/thumbnail"} if has_search and deployment.keeps_thumbnails else {}),
        **_REPORTS,
    }


@get("/page-assets/{name:str}", include_in_schema=False)
async def page_asset(name: FromPath[str]) -> ASGIApp:
    """Serve one of the page's files."""
    if name not in ASSETS:
        raise NotFoundException
    media_type = ASSETS[name]
    cache_control = _CACHE_IMAGES if media_type.startswith("image/") else _CACHE_CODE
    return FileResponse(FOLDER / name, media_type, (_NOSNIFF, cache_control))


@cache
def _page() -> bytes:
    return (FOLDER / "page.html").read_bytes()
