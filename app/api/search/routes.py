"""All routes of search, in its own process, and what is injected into them."""

from litestar import get
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler

from app.api.beside import REPORT, Report
from app.api.context import AnyRequest, context_of
from app.api.routes import ModelRoute
from app.api.search import find, images, ingest, jobs
from app.api.search.asking import WorkerSearch, search_of

_ALL: list[HTTPRouteHandler] = [route for module in (ingest, jobs, find, images) for route in module.ROUTES]
MODEL_ROUTES = [route for route in _ALL if isinstance(route, ModelRoute)]
ROUTES = [route for route in _ALL if not isinstance(route, ModelRoute)]


@get(REPORT, include_in_schema=False)
async def report(request: AnyRequest, search: WorkerSearch) -> Report:
    """Tell the workers beside whether search works. They ask often, so that is neither counted nor logged."""
    context_of(request.scope).is_passed_on = True
    return Report(await search.why_unusable(), search.is_read_only)


def providers() -> dict[str, Provide]:
    """Return the dependencies of one application by parameter name, as `app.api.dependencies.providers` does."""
    return {"search": Provide(search_of, use_cache=True, sync_to_thread=False)}
