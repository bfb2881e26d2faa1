"""An application with all dialects."""

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from app import main
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import DIALECTS, Settings
from tests.fakes.https import Host, response, serving
from tests.support import SCENE, started


@pytest.fixture(scope="session")
async def server(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose default model finds red and blue rectangles."""
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns", dialects=",".join(DIALECTS)))) as client:
        yield client


@pytest.fixture
async def remote(
    settings: Settings, triton: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Host, httpx.AsyncClient]]:
    """A host that has the scene at `/scene.bmp`, and a client of an application that may fetch from there."""
    assert triton.poll() is None
    async with serving() as host:
        host.answers["/scene.bmp"] = response(SCENE)
        monkeypatch.setattr(main, "Fetcher", lambda hosts, max_bytes, **others: host.fetcher(*hosts, max_bytes=max_bytes, **others))
        own = msgspec.structs.replace(settings, model="six_columns", url_hosts=f"*.example.org:{host.port}")
        async with started(create_app(own)) as client:
            yield host, client
