"""The name of a request's route, which does not depend on what becomes of the request."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from litestar.enums import ScopeType
from litestar.types import Receive, Scope, Send

from app.api.application import Application
from app.api.route import UNMATCHED, route_of
from app.main import create_app
from tests.api.conftest import post_unread, settings_for
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, call, lifespan_of, started, staying


def watched(app: Application, routes: list[str]) -> Application:
    """Note the route of each request to an application, once it has been answered."""

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if scope["type"] == ScopeType.HTTP:
            routes.append(route_of(scope))

    return watch


@pytest.fixture
async def client() -> AsyncIterator[tuple[httpx.AsyncClient, list[str]]]:
    """A client of an application, and the routes of its requests."""
    routes: list[str] = []
    async with serving(fake := FakeTriton()), started(watched(create_app(settings_for(fake.url)), routes)) as client:
        yield client, routes


@pytest.mark.parametrize(
    ("method", "path", "status", "route"),
    [
        ("GET", "/livez", 200, "/livez"),
        ("HEAD", "/livez", 200, "/livez"),
        ("OPTIONS", "/livez", 204, "/livez"),
        ("GET", "/v1/models/", 200, "/v1/models"),
        ("POST", "/predict/tiny", 502, "/predict/{model}"),
        ("POST", "/v1/predict/tiny/", 502, "/v1/predict/{model}"),
        ("POST", "/detect?model=tiny", 502, "/detect"),
        ("POST", "/detect?confidence=2", 400, "/detect"),
        ("GET", "/docs", 200, "/docs"),
        ("GET", "/docs/openapi.json", 200, "/docs/openapi.json"),
        ("GET", "/docs/nothing", 404, "/docs/{path}"),
        ("GET", "/docs-assets/nothing", 404, "/docs-assets/{name}"),
        ("GET", "/", 200, "/"),
        ("GET", "/page-assets/nothing", 404, "/page-assets/{name}"),
        ("GET", "/nowhere", 404, UNMATCHED),
        ("POST", "/predict/", 502, "/ultralytics/predict"),
        ("POST", "/predict/a/b", 404, UNMATCHED),
        ("GET", "/v1/docs", 404, UNMATCHED),
        ("POST", "/livez", 405, "/livez"),
        ("FROBNICATE", "/livez", 405, "/livez"),
        ("GET", "/detect", 405, "/detect"),
        ("HEAD", "/predict/tiny", 405, "/predict/{model}"),
        ("PUT", "/v1/predict/tiny/", 405, "/v1/predict/{model}"),
    ],
)
async def test_a_request_has_the_template_of_its_path(
    client: tuple[httpx.AsyncClient, list[str]], method: str, path: str, status: int, route: str
) -> None:
    """Also one that is rejected for its method, or fails; a path that does not exist has one name with all others."""
    caller, routes = client
    response = await caller.request(method, path, content=SCENE if method == "POST" else None)

    assert (response.status_code, routes) == (status, [route])


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/detect", "/detect"),
        ("/v1/detect/", "/v1/detect"),
        ("/detect?model=other", "/detect"),
        ("/predict/tiny", "/predict/{model}"),
        ("/v1/predict/tiny", "/v1/predict/{model}"),
    ],
)
async def test_a_request_that_is_rejected_in_front_of_litestar_has_it_as_well(path: str, route: str) -> None:
    """While the gateway is full: another client is still sending its image."""
    routes: list[str] = []
    async with serving(fake := FakeTriton()):
        app = watched(create_app(settings_for(fake.url, max_uploads=1)), routes)
        async with lifespan_of(app):
            part = {"type": "http.request", "body": b"x", "more_body": True}
            sending = asyncio.create_task(call(app, staying(part), "/detect", {"Content-Length": "100"}))
            await asyncio.sleep(0.1)
            reply = await post_unread(app, path, {"Content-Length": "100"})
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    assert (reply.status, routes) == (429, [route])
