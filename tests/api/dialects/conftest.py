"""An application with all dialects."""

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import DIALECTS, Settings
from tests.support import started


@pytest.fixture(scope="session")
async def server(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose default model finds red and blue rectangles."""
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns", dialects=",".join(DIALECTS)))) as client:
        yield client
