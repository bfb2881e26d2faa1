"""A gateway with search on: for each test its own, or one for all tests of a module."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.postgres import Server
from tests.search.made import gateway_of


@pytest.fixture
def search_settings(settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path) -> Settings:
    """Settings for an empty database: red is a person, blue a car, and both are faces; a folder may be indexed."""
    assert triton.poll() is None
    given = {"model": "person_and_car", "faces": True, "database_url": database, "search_folders": str(tmp_path)}
    return msgspec.structs.replace(settings, **given)


@pytest.fixture
async def searching(search_settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with these settings."""
    async with gateway_of(search_settings) as client:
        yield client


@pytest.fixture(scope="module")
async def gateway_settings(settings: Settings, triton: EmbeddedTriton, postgres: Server) -> AsyncIterator[Settings]:
    """The same settings for a database of the module."""
    assert triton.poll() is None
    async with postgres.fresh() as url:
        yield msgspec.structs.replace(settings, model="person_and_car", faces=True, database_url=url, search_thumbnails=True)


@pytest.fixture(scope="module")
async def engine(gateway_settings: Settings) -> AsyncIterator[PostgresEngine]:
    opened = PostgresEngine(gateway_settings.database_url)
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
async def gateway(gateway_settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway_of(gateway_settings) as client:
        yield client
