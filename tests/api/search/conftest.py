"""A gateway with search on, for a test or for all of a module; and images that get into an index with any text."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import msgspec
import pytest
from PIL import Image, ImageDraw

from app.search import describe
from app.search.engine import TextPart
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.imaging.samples import encode
from tests.postgres import Server
from tests.search.made import gateway_of
from tests.support import json

OpenGateway = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def search_settings(served: Settings, database: str, tmp_path: Path) -> Settings:
    """Settings for an empty database: red is a person, blue a car, and both are faces; a folder may be indexed."""
    given = {"model": "person_and_car", "faces": True, "database_url": database, "search_folders": str(tmp_path)}
    return msgspec.structs.replace(served, **given)


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
    return {"X-API-Key": f"{name}.s", "X-Request-ID": name}


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
async def gateway_settings(served: Settings, postgres: Server) -> AsyncIterator[Settings]:
    """The same settings for a database of the module."""
    async with postgres.fresh() as url:
        yield msgspec.structs.replace(served, model="person_and_car", faces=True, database_url=url, search_thumbnails=True)


@pytest.fixture(scope="module")
async def gateway(gateway_settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway_of(gateway_settings) as client:
        yield client


def picture(red: Sequence[int] = (), blue: Sequence[int] = ()) -> bytes:
    """Draw a red and a blue rectangle, each x1 y1 x2 y2 in pixels, as PNG."""
    image = Image.new("RGB", (200, 100), "white")
    for colour, box in (("red", red), ("blue", blue)):
        if box:
            ImageDraw.Draw(image).rectangle(tuple(box), colour)
    return encode(image, "PNG")


async def index(client: httpx.AsyncClient, image_id: str, image: bytes, lines: Sequence[str] = (), **metadata: object) -> None:
    """Add an image with all that models say of it, but for the text, which is these lines."""
    texts = [TextPart(text=line, corners=(0.1, 0.2, 0.5, 0.2, 0.5, 0.4, 0.1, 0.4), score=0.9) for line in lines]
    data = {"image_id": image_id, "image_path": f"/images/{image_id}.png", "metadata": msgspec.json.encode(metadata)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(describe._READERS, "text", ("lines", lambda _: texts))  # noqa: SLF001
        json(await client.post("/ingest?detect_near_duplicates=false", files={"image": image}, data=data), 201)
