"""Applications of the kinds that tests of HTTP need: with a fake Triton, and without any; and time that passes at once."""

import asyncio
import functools
import hashlib
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import grpc
import httpx
import msgspec
import pytest
from litestar import Litestar
from litestar.routes import BaseRoute
from litestar.types import Message, Receive, Scope, Send
from structlog.testing import CapturedCall

from app import main
from app.api.admission import middleware
from app.api.application import Application
from app.feature import settings_kind
from app.main import create_app
from app.settings.schema import DIALECTS, Settings
from tests.fakes import http
from tests.fakes.triton import FakeTriton, serving
from tests.support import REPOSITORY, SCENE, Headers, Reply, call, calling, captured_log, free_port, lifespan_of, started

Gateway = tuple[FakeTriton, httpx.AsyncClient]
ADMIN, CAMERA = ({"X-API-Key": f"{id_}.secret"} for id_ in ("boss", "camera"))
"""Headers with the keys of tests in which one caller changes something, and another only detects."""


def settings_for(url: str, **others: object) -> Settings:
    given = {"triton_endpoints": url, "model": "tiny", "model_repository": str(REPOSITORY), "log_level": "error", **others}
    return settings_kind()(**given)  # type: ignore[arg-type]


@asynccontextmanager
async def client_for(fake: FakeTriton, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake), started(create_app(settings_for(fake.url, **settings))) as client:
        yield client


@pytest.fixture(scope="module")
async def shared_app() -> AsyncIterator[Application]:
    """An application whose Triton finds nothing, which accepts bodies of one MiB; only for tests that leave both as they are."""
    fake = FakeTriton().find_nothing()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, max_file_size_mb=1))):
        yield app


@pytest.fixture(scope="module")
async def reader(shared_app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(shared_app) as client:
        yield client


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """A fake Triton, and a client of an application that uses it and has warmed up."""
    async with client_for(fake := FakeTriton()) as client:
        fake.requests.clear()
        yield fake, client


@pytest.fixture
async def filling() -> AsyncIterator[tuple[FakeTriton, Application]]:
    """A fake Triton that does not answer inferences, and an application that allows one request per model."""
    fake = FakeTriton()
    async with serving(fake):
        fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
        made = create_app(settings_for(fake.url, max_requests=1))
        async with lifespan_of(made):
            fake.query_refusal = None
            fake.may_answer.clear()
            yield fake, made
            fake.may_answer.set()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    """What is logged at the end of each request."""
    return captured_log(monkeypatch, middleware)


@pytest.fixture
async def lonely() -> AsyncIterator[httpx.AsyncClient]:
    async with started(create_app(settings_for(f"127.0.0.1:{free_port()}"))) as client:
        yield client


@pytest.fixture(scope="session")
async def server(served: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with all dialects, whose default model finds red and blue rectangles."""
    async with started(create_app(msgspec.structs.replace(served, model="six_columns", dialects=",".join(DIALECTS)))) as client:
        yield client


@pytest.fixture
async def remote(served: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[http.Host, httpx.AsyncClient]]:
    """A host that has the scene at `/scene.bmp`, and a client of an application that may fetch from there."""
    async with http.serving_host() as host:
        host.answers["/scene.bmp"] = http.response(SCENE)
        monkeypatch.setattr(main, "Fetcher", lambda hosts, max_bytes, **others: host.fetcher(*hosts, max_bytes=max_bytes, **others))
        own = msgspec.structs.replace(served, model="six_columns", url_hosts=f"*.example.org:{host.port}", max_file_size_mb=1)
        async with started(create_app(own)) as client:
            yield host, client


def write_keys(folder: Path, *keys: tuple[str, str, str], tenants: Mapping[str, str] | None = None) -> str:
    """Write a file of API keys, each with id, secret and scopes, and some with a tenant; returns its path."""
    file = folder / "keys.toml"
    lines: list[str] = []
    for id_, secret, scopes in keys:
        lines += [f"[{id_}]", f'sha256 = ["{hashlib.sha256(secret.encode()).hexdigest()}"]', f"scopes = {scopes.split()}"]
        lines += [f'tenant = "{tenants[id_]}"'] if tenants and id_ in tenants else []
    file.write_text("\n".join(lines))
    return str(file)


def routes_of(app: Any) -> Sequence[BaseRoute]:  # noqa: ANN401 - an application does not show what it wraps
    while not isinstance(app, Litestar):
        app = app.app
    return app.routes


async def post_unread(app: Application, path: str, headers: Headers) -> Reply:
    """POST without a body; the application must not even ask for one before it has answered."""
    is_answered = False

    async def receive() -> Any:  # noqa: ANN401
        assert is_answered, "the body was read"
        return {"type": "http.disconnect"}

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_watched(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        await app(scope, receive, send_watched)

    return await call(watched, receive, path, headers)


P = ParamSpec("P")


class _Selector(selectors.DefaultSelector):
    """Does not wait until the next timer, but notes how long that would have taken."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that never comes"
        self.now += max(timeout, 0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in a loop whose clock begins at zero and jumps to the next timer; it must use neither threads nor sockets."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()
