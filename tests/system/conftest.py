"""Fixtures of modules whose Triton has the settings of their fixture `own`."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from app.triton.client import TritonClient
from tests.support import started


@pytest.fixture(scope="module")
def own_triton(own: Settings) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(own)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
async def gateway(own: Settings, own_triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    assert own_triton.poll() is None
    async with started(create_app(own)) as client:
        yield client


@pytest.fixture
async def own_client(own: Settings, own_triton: EmbeddedTriton) -> AsyncIterator[TritonClient]:
    assert own_triton.poll() is None
    client = TritonClient(own.triton_address)
    yield client
    await client.close()
