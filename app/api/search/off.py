"""What the routes of search say while it is off."""

from typing import Any

from litestar import Request, route
from litestar.enums import HttpMethod
from litestar.response.base import ASGIResponse

from app.api.routes import VERSION, ModelRoute
from app.api.search import routes
from app.errors import NotOffered

_FOR_MODELS = {path for each in routes.MODEL_ROUTES for path in each.paths}
_OTHERS = {path for each in routes.ROUTES for path in each.paths}


@ModelRoute(sorted(_FOR_MODELS), task=None, include_in_schema=False)
async def off(request: Request[Any, Any, Any]) -> ASGIResponse:
    """Say that search is off, and how it is turned on."""
    path = request.scope["path"].removeprefix(VERSION).rstrip("/")
    raise NotOffered(f"{path} is off, because this gateway keeps no images; `nereid serve --search` turns it on")


_METHODS = [HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE]


@route(sorted(_OTHERS), http_method=_METHODS, status_code=200, include_in_schema=False, opt={"scope": "detect"})
async def off_without_model(request: Request[Any, Any, Any]) -> None:
    """Say the same of what asks no model, by whatever method."""
    await off.fn(request)


MODEL_ROUTES = [off]
ROUTES = [off_without_model]
