"""Images with vectors that are made, and a gateway on a database with them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from app.main import create_app
from app.search.engine import FacePart, NewImage, Vector
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.support import started

DIMENSIONS = 12
"""Of the small model of faces, and of images here."""


@asynccontextmanager
async def searching(settings: Settings, database: str, **others: object) -> AsyncIterator[tuple[PostgresEngine, httpx.AsyncClient]]:
    """Start a gateway with search and faces; yield an engine on its database, and a client."""
    engine = PostgresEngine(database)
    given = {"model": "six_columns", "search": "alone", "database_url": database, "faces": True, **others}
    async with started(create_app(msgspec.structs.replace(settings, **given))) as client:
        yield engine, client
    await engine.close()


def like(axis: int, turn: float = 0.0) -> NDArray[np.float32]:
    """Return a vector of length 1 near an axis, turned from it by an angle towards the next one, radians."""
    vector = np.zeros(DIMENSIONS, np.float32)
    vector[[axis, (axis + 1) % DIMENSIONS]] = np.cos(turn), np.sin(turn)
    return vector


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
    return msgspec.structs.replace(with_vector(image_id), faces=faces)


def with_vector(image_id: str, vector: NDArray[np.float32] | None = None) -> NewImage:
    """Make an image with this vector."""
    vectors = [] if vector is None else [Vector(vector, "embedding:1")]
    content_hash = image_id.encode().ljust(32)[-32:]
    return NewImage(image_id=image_id, content_hash=content_hash, path=f"/{image_id}.jpg", width=9, height=9, vectors=vectors)
