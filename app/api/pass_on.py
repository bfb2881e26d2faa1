"""The routes of search in a worker, which passes them on, or says that search is off."""

from typing import cast

from litestar import route
from litestar.enums import HttpMethod
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from app.api.beside import SearchProcess
from app.api.caller.check import require_key
from app.api.context import AnyRequest
from app.api.dependencies import Worker, WorkerResources
from app.api.receiving.client_watch import has_body
from app.api.routes import DOCS, SEARCH_DOCS, VERSION
from app.errors import NotOffered

_PATHS = [
    *("/ingest", "/ingest/{below:path}", "/search/{below:path}", "/query/{below:path}"),
    *("/faces/search", "/faces/identify", "/ocr/search"),
]
_METHODS = [HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE]


def pass_on(worker: WorkerResources) -> ASGIApp:
    """Return an application that passes a request on to search, which is on."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if f"{scope['path']}/".startswith(f"{SEARCH_DOCS}/"):
            scope = cast("Scope", {**scope, "path": DOCS + scope["path"].removeprefix(SEARCH_DOCS)})
        await cast("SearchProcess", worker.search).pass_on(cast("HTTPScope", scope), receive, send)

    return answer


@route(_PATHS, http_method=_METHODS, status_code=200, include_in_schema=False)
async def ask_search(request: AnyRequest, worker: Worker) -> ASGIApp:
    """Pass a request on to search; raise NotOffered if it is off."""
    if worker.search is None:
        path = request.scope["path"].removeprefix(VERSION).rstrip("/")
        raise NotOffered(f"{path} is off, because this gateway keeps no images; `nereid serve --search` turns it on")
    if has_body(dict(request.scope["headers"])):  # before it is received: the process's own refusal is read after it
        require_key(request, worker.keys, None, is_dialect=False)
    return pass_on(worker)
