"""Images with vectors that are made, and a gateway on a database with them."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec
import numpy as np
import pytest
from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server
from numpy.typing import NDArray

from app.api.application import Application
from app.host.processes import SEARCH_SOCKET
from app.main import create_app
from app.resilience import worker_table
from app.search.engine import FacePart, NewImage, Vector
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.support import TABLE_VARIABLE, calling, lifespan_of


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[Application]:
    """Start a worker, and what searches beside it: both in this process, with a socket between them; yield the worker."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as patience:
        for limit in ("_BEAT_SECONDS", "_SLOW_SECONDS"):  # a busy machine is not a dead process or database
            patience.setattr(f"app.api.beside.{limit}", 20.0)
        socket = Path(folder, "search.sock")
        patch.setenv(SEARCH_SOCKET, str(socket))
        patch.setenv(TABLE_VARIABLE, "")
        table = worker_table.create()
        beside, worker = (create_app(msgspec.structs.replace(settings, search=search)) for search in ("alone", "on"))
        server = Server(beside, uds=socket, interface=Interfaces.ASGINL, http=HTTPModes.http1, websockets=False, log_enabled=False)
        async with lifespan_of(beside):
            serving = asyncio.create_task(server.serve())
            try:
                async with lifespan_of(worker):
                    patch.undo()
                    os.close(table)
                    yield worker
            finally:
                server.stop()  # type: ignore[no-untyped-call]
                await serving


@asynccontextmanager
async def gateway_of(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Start both; yield a client of the worker."""
    async with served(settings) as app, calling(app) as client:
        yield client


@asynccontextmanager
async def searching(settings: Settings, database: str, **others: object) -> AsyncIterator[tuple[PostgresEngine, httpx.AsyncClient]]:
    """Start a gateway with search and faces; yield an engine on its database, and a client."""
    engine = PostgresEngine(database)
    given = {"model": "six_columns", "database_url": database, "faces": True, **others}
    async with gateway_of(msgspec.structs.replace(settings, **given)) as client:
        yield engine, client
    await engine.close()


def with_faces(image_id: str, *vectors: NDArray[np.float32], quality: float = 0.9) -> NewImage:
    """Make an image whose faces have these vectors."""
    faces = [
        FacePart(
            box=(0.1, 0.1, 0.4, 0.4),
            score=0.9,
            landmarks=[0.2] * 10,
            quality=quality,
            vectors=[Vector(vector, "faces_description:1")],
        )
        for vector in vectors
    ]
    content_hash = image_id.encode().ljust(32)[-32:]
    return NewImage(image_id=image_id, content_hash=content_hash, path=f"/{image_id}.jpg", width=9, height=9, faces=faces)
