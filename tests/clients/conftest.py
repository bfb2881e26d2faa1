"""The client's two classes in front of the gateway's application, without a network, and responses for tests that need none."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from app.main import create_app
from app.settings.schema import Settings
from nereid_client import AsyncClient, Client
from tests.support import lifespan_of

TINY = {"name": "tiny", "version": "1", "backend": "triton", "device": "cpu"}


def detected(
    *boxes: tuple[str, int, float, tuple[float, float, float, float]], size: tuple[int, int] = (200, 100), **others: object
) -> httpx.Response:
    detections = [
        {**dict(zip(("x1", "y1", "x2", "y2"), corners, strict=True)), "confidence": score, "class_id": id_, "class_name": name}
        for name, id_, score, corners in boxes
    ]
    body = {"detections": detections, "image": {"width": size[0], "height": size[1]}, "model": TINY}
    return httpx.Response(200, json={**body, "total_time_ms": 1.5, "request_id": "0123456789abcdef", **others})


def refused(status: int, code: str, retry_after: str | None = None) -> httpx.Response:
    problem = {"type": f"urn:nereid:problem:{code}", "title": "Refused", "status": status, "code": code}
    body = {**problem, "detail": "not now", "request_id": "7"}
    return httpx.Response(status, json=body, headers={"Retry-After": retry_after} if retry_after else None)


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
async def transport(served: Settings) -> AsyncIterator[httpx.ASGITransport]:
    async with lifespan_of(app := create_app(served)):
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
