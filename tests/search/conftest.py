"""An engine on a database of its own."""

from collections.abc import AsyncIterator

import pytest

from app.search.postgres.engine import PostgresEngine


@pytest.fixture
async def engine(database: str) -> AsyncIterator[PostgresEngine]:
    opened = PostgresEngine(database)
    yield opened
    await opened.close()
