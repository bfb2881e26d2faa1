"""What many tests need: paths, free ports, an application with its lifespan, and its answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from app.api.application import Application
from app.host.ports import find_free

ROOT = Path(__file__).parents[1]
REPOSITORY = ROOT / "model_repository"
IMAGES = ROOT / "tests" / "images"
SHARED = ROOT.parent / "shared"
"""More test data; tests that need it are skipped where it does not exist."""


def free_port() -> int:
    """Find a port on which nobody listens."""
    return find_free(1)[0]


@asynccontextmanager
async def started(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application's lifespan around a client that calls it directly."""
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    lifespan = asyncio.ensure_future(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://nereid") as client:
            yield client
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        await lifespan


def sample_image(name: str) -> bytes:
    """Read one of the project's sample images."""
    return (IMAGES / name).read_bytes()


def json(response: httpx.Response, status: int = 200) -> Any:  # noqa: ANN401
    """Return the JSON of a response that must have this status."""
    assert response.status_code == status, response.text
    return response.json()


async def eventually(holds: Callable[[], bool]) -> bool:
    """Wait up to ten seconds until something holds."""
    for _ in range(100):
        if holds():
            return True
        await asyncio.sleep(0.1)
    return False
