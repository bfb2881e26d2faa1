"""A gateway with search on: for each test its own, or one for all tests of a module."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.postgres import Server
from tests.search.made import gateway_of

OpenGateway = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def search_settings(settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path) -> Settings:
    """Settings for an empty database: red is a person, blue a car, and both are faces; a folder may be indexed."""
    assert triton.poll() is None
    given = {"model": "person_and_car", "faces": True, "database_url": database, "search_folders": str(tmp_path)}
    return msgspec.structs.replace(settings, **given)


@pytest.fixture
def open_gateway(search_settings: Settings, tmp_path: Path) -> OpenGateway:
    """Start a gateway with other settings, or with keys, whose secret is `s`: names with their scopes."""

    def open_one(keys: dict[str, str] | None = None, tenants: tuple[str, ...] = (), **others: object) -> object:
        if keys:
            own = dict(zip(tenants, tenants, strict=True))
            others["api_keys_file"] = write_keys(tmp_path, *((name, "s", scopes) for name, scopes in keys.items()), tenants=own)
        return gateway_of(msgspec.structs.replace(search_settings, **others))

    return open_one  # type: ignore[return-value]


def key(name: str) -> dict[str, str]:
    return {"X-API-Key": f"{name}.s"}


@pytest.fixture
async def searching(open_gateway: OpenGateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with these settings."""
    async with open_gateway() as client:
        yield client


@pytest.fixture
async def own_engine(database: str) -> AsyncIterator[PostgresEngine]:
    opened = PostgresEngine(database)
    yield opened
    await opened.close()


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
