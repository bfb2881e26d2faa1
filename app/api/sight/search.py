"""POST /faces/search, /faces/identify and /ocr/search: what searches stored images is not there yet."""

from typing import Any

from litestar import Request
from litestar.response.base import ASGIResponse

from app.api.routes import VERSION, ModelRoute
from app.errors import NotOffered

_INSTEAD = {
    "/faces/search": "/faces/recognize gives the vectors of faces",
    "/faces/identify": "/faces/verify compares the faces in two images",
    "/ocr/search": "/ocr/predict reads the text in an image",
}


@ModelRoute([*_INSTEAD], task=None, include_in_schema=False)
async def search(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Say that this is not there yet, and what is."""
    path = request.scope["path"].removeprefix(VERSION).rstrip("/")
    raise NotOffered(f"{path} is not there yet, because the gateway stores no images; {_INSTEAD[path]}")


ROUTES = [search]
