"""HEAD on every route that GET has, which `curl -I` asks for."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from litestar.enums import ScopeType
from litestar.routes import HTTPRoute
from litestar.types import Receive, Scope, Send

from app.api.head import HeadMiddleware
from app.main import create_app
from tests.api.conftest import routes_of, settings_for
from tests.support import json, receiving

_VALUES = {"name": "swagger_style.css", "path": "nothing"}
"""What the routes' paths may contain."""
_OF_EACH_RESPONSE = {"x-request-id", "x-process-time", "server-timing"}


def _get_paths() -> Iterator[str]:
    for route in routes_of(create_app(settings_for("127.0.0.1:1"))):
        if isinstance(route, HTTPRoute) and "GET" in route.methods:
            yield re.sub(r"{(\w+)}", lambda found: _VALUES[found[1]], route.path_format)


GET_PATHS = sorted(_get_paths())


def headers_of(response: httpx.Response) -> dict[str, str]:
    """Return the headers that do not vary between responses."""
    return {name: value for name, value in response.headers.items() if name not in _OF_EACH_RESPONSE}


def test_the_routes_are_those_of_the_application() -> None:
    """Those of the API with and without version, and those of the documentation."""
    versioned = ["/health", "/live", "/livez", "/models", "/ready", "/readyz"]
    unversioned = ["/", "/page-assets/swagger_style.css"]
    documentation = ["/docs", "/docs/openapi.json", "/docs-assets/swagger_style.css"]

    assert {*versioned, *(f"/v1{path}" for path in versioned), *unversioned, *documentation} <= set(GET_PATHS)


@pytest.mark.parametrize("path", [*GET_PATHS, "/docs-assets/nothing", "/nowhere"])
async def test_head_is_get_without_the_body(reader: httpx.AsyncClient, path: str) -> None:
    """Status and headers are the same, the length of the body among them."""
    got, asked = await reader.get(path), await reader.head(path)

    assert asked.status_code == got.status_code
    assert asked.content == b""
    assert headers_of(asked).keys() == headers_of(got).keys()
    assert set(asked.headers) >= _OF_EACH_RESPONSE
    if path.removeprefix("/v1") not in {"/health", "/metrics", "/ready"}:  # which tell something else each time
        assert headers_of(asked) == headers_of(got)
        assert int(asked.headers["content-length"]) == len(got.content) > 0


@pytest.mark.parametrize("path", GET_PATHS)
async def test_the_allowed_methods_are_told(reader: httpx.AsyncClient, path: str) -> None:
    """GET comes with HEAD, whether a caller asks for the methods or uses a wrong one."""
    for response, status in ((await reader.options(path), 204), (await reader.put(path), 405)):
        assert response.status_code == status
        assert sorted({*response.headers["allow"].split(", ")} - {"POST"}) == ["GET", "HEAD", "OPTIONS"]


@pytest.mark.parametrize("path", ["/detect", "/predict/tiny", "/v1/detect"])
async def test_a_route_without_get_has_no_head(reader: httpx.AsyncClient, path: str) -> None:
    response = await reader.head(path)

    assert (response.status_code, response.content) == (405, b"")
    assert sorted(response.headers["allow"].split(", ")) == ["OPTIONS", "POST"]


async def test_head_is_not_described(reader: httpx.AsyncClient) -> None:
    document = json(await reader.get("/docs/openapi.json"))

    assert {method for path in document["paths"].values() for method in path} == {"get", "post"}


@pytest.mark.parametrize(
    "body",
    [
        [{"type": "http.response.body", "body": b"one", "more_body": True}, {"type": "http.response.body", "body": b"two"}],
        [{"type": "http.response.pathsend", "path": "/a/file"}],
    ],
    ids=["parts", "file"],
)
async def test_bodies_of_all_kinds_are_left_out(body: list[dict[str, Any]]) -> None:
    sent: list[Any] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["type"] == ScopeType.HTTP
        assert scope["method"] == "GET"
        for message in ({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]}, *body):
            await send(message)  # type: ignore[arg-type]

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    await HeadMiddleware(app)({"type": "http", "method": "HEAD"}, receiving(), send)  # type: ignore[arg-type]

    start, *rest = sent
    assert start["headers"] == [(b"content-length", b"6")]
    assert [message["body"] for message in rest] == [b""] * len(body)
    assert [message["more_body"] for message in rest] == [True] * (len(body) - 1) + [False]
