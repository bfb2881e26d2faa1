"""All routes of search."""

from litestar.handlers import HTTPRouteHandler

from app.api.routes import ModelRoute
from app.api.search import find, images, ingest, jobs

_ALL: list[HTTPRouteHandler] = [route for module in (ingest, jobs, find, images) for route in module.ROUTES]
MODEL_ROUTES = [route for route in _ALL if isinstance(route, ModelRoute)]
"""Those that ask models, or receive images, with the scope that they need."""
ROUTES = [route for route in _ALL if not isinstance(route, ModelRoute)]
"""The others. They need the scope `search`, or that in their `opt`."""
