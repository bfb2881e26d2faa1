"""The client's two classes in front of the gateway's application, without a network."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from nereid_client import AsyncClient, Client
from tests.support import lifespan_of


class ThreadTransport(httpx.BaseTransport):
    """Calls an asynchronous transport of an event loop that runs in another thread."""

    def __init__(self, transport: httpx.ASGITransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return asyncio.run_coroutine_threadsafe(self._handle(request), self._loop).result()

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


@pytest.fixture(scope="session")
async def transport(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.ASGITransport]:
    assert triton.poll() is None
    async with lifespan_of(app := create_app(settings)):
        yield httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]


@pytest.fixture
async def asynchronous(transport: httpx.ASGITransport) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(transport=transport) as client:
        yield client


@pytest.fixture
async def synchronous(transport: httpx.ASGITransport) -> AsyncIterator[Client]:
    """A client whose methods must be called in another thread."""
    with Client(transport=ThreadTransport(transport, asyncio.get_running_loop())) as client:
        yield client
