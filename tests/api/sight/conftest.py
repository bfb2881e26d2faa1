"""A gateway with faces and cascades of an operator."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import started

OpenGateway = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def open_gateway(settings: Settings, triton: EmbeddedTriton, tmp_path: Path) -> OpenGateway:
    """Start a gateway with these cascades and other settings."""
    assert triton.poll() is None

    @asynccontextmanager
    async def open_one(cascades: str = "", **others: object) -> AsyncIterator[httpx.AsyncClient]:
        if cascades:
            (tmp_path / "cascades.toml").write_text(cascades)
            others["model_repository"] = str(tmp_path)
        async with started(create_app(msgspec.structs.replace(settings, faces=True, model="six_columns", **others))) as client:
            yield client

    return open_one
