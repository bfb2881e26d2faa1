"""Where the routes of dialects are, and who gets a request at a path that several have."""

from collections.abc import Sequence
from typing import Any

import pytest
from litestar import get, post
from litestar.types import HTTPScope
from msgspec import to_builtins

from app.api.dialects import routing
from app.api.dialects.dialect import Dialect
from app.api.dialects.routing import DialectMiddleware
from app.dialect_names import DIALECTS


@get("/status")
async def status() -> None:
    """Is at a path of its own."""


@post("/predict")
async def predict() -> None:
    """Is at a path that others have, too."""


@post("/{model:str}/{version:int}")
async def versioned(model: str, version: int) -> None:
    """Is at a path with parameters."""


def is_json(scope: HTTPScope) -> bool:
    """Recognise a request by its type."""
    return (b"content-type", b"application/json") in scope["headers"]


ONE = Dialect("one", [status, predict], to_builtins, callers={"/predict": is_json})
OTHER = Dialect("other", [predict, versioned], to_builtins, callers={"/predict": lambda scope: not is_json(scope)})
TYPED = [(b"content-type", b"application/json")]


async def path_of(path: str, dialects: Sequence[Dialect] = (ONE, OTHER), headers: Sequence[tuple[bytes, bytes]] = ()) -> str:
    """Return the path at which a request arrives."""
    arrived: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:  # noqa: ANN401
        arrived.append(scope["path"])

    scope: Any = {"type": "http", "path": path, "method": "POST", "headers": list(headers)}
    await DialectMiddleware(app, dialects)(scope, None, None)  # type: ignore[arg-type]
    return arrived[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/status", "/one/status"),
        ("/status/", "/one/status/"),
        ("/one/status", "/one/status"),
        ("/yolo11n/3", "/other/yolo11n/3"),
        ("/yolo11n/three", "/yolo11n/three"),
        ("/yolo11n/3/4", "/yolo11n/3/4"),
        ("/detect", "/detect"),
        ("/v1/detect", "/v1/detect"),
        ("/", "/"),
        ("//", "//"),
        ("//status", "/one//status"),
        ("", ""),
    ],
)
async def test_a_request_goes_to_the_dialect_that_has_its_path(path: str, expected: str) -> None:
    """And is left alone if none has it."""
    assert await path_of(path) == expected


async def test_the_request_tells_two_dialects_with_one_path_apart() -> None:
    """In any order of them."""
    assert await path_of("/predict", headers=TYPED) == "/one/predict"
    assert await path_of("/predict") == "/other/predict"
    assert await path_of("/predict", (OTHER, ONE), TYPED) == "/one/predict"


async def test_a_request_that_no_dialect_recognises_stays_where_it_is() -> None:
    """The gateway may have a route for it."""
    assert await path_of("/predict", [ONE]) == "/predict"


async def test_other_events_pass() -> None:
    """The lifespan has no path."""
    seen: list[Any] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:  # noqa: ANN401
        seen.append(scope)

    await DialectMiddleware(app, [ONE])({"type": "lifespan"}, None, None)  # type: ignore[arg-type]

    assert seen == [{"type": "lifespan"}]


def test_each_name_is_that_of_a_dialect() -> None:
    """Which says the same of itself."""
    assert [dialect.name for dialect in routing.load(DIALECTS)] == list(DIALECTS)


def test_dialects_with_one_path_tell_their_requests_apart() -> None:
    """Otherwise the first one would get all of them."""
    claims: dict[str, list[Dialect]] = {}
    for dialect in routing.load(DIALECTS):
        for path in {path for handler in dialect.handlers for path in handler.paths}:
            claims.setdefault(path, []).append(dialect)

    assert [
        path for path, dialects in claims.items() if len(dialects) > 1 and any(path not in one.callers for one in dialects)
    ] == []
