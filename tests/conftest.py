"""A real embedded Triton for the whole session, with the models the tests compose beside the served ones."""

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.types import ASGIApp

from app import bundle, catalogue, embedded
from app.config import Settings
from app.main import create_app
from app.pull import fetch, pull
from tests import layouts

ROOT = Path(__file__).parents[1]
REPOSITORY = ROOT / "model_repository"
PICTURES = ROOT / "tests" / "pictures"
SHARED = ROOT.parent / "shared"
# A re-export of the published network, which cannot be fetched everywhere.
SHARED_YOLOX = SHARED / "models" / "yolox_nano.onnx"
SHARED_YOLOX_SHA256 = "695e750a5d5754bb5a8d5325643b59282191a7e7a564e435a415fd3c578eab14"


def free_port() -> int:
    """Find a port nobody listens on, below those that the kernel gives to outgoing connections."""
    return next(port for port in iter(lambda: secrets.choice(range(10_000, 30_000)), None) if embedded.is_free("127.0.0.1", port))


@asynccontextmanager
async def started(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application's lifespan around a client that calls it directly."""
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    life = asyncio.ensure_future(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://nereid") as client:
            yield client
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        await life


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, networks: dict[str, Path]) -> Path:
    """Give the session a repository of its own: the project's models, as far as they can be had, and the composed ones."""
    bundle.install(ROOT / ".triton")
    copy = tmp_path_factory.mktemp("models") / "repository"
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns("model.onnx"))
    entries = catalogue.load(copy / "models.toml")
    for name, network in networks.items():
        digest = hashlib.sha256(network.read_bytes()).hexdigest()
        pull(name, entries[name], copy, source=network, sha256=digest)
    layouts.write(copy)
    return copy


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fetch the networks as they were published, as far as they can be had: by model."""
    entries = catalogue.load(REPOSITORY / "models.toml")
    found = {"yolo11n": fetch(entries["yolo11n"], tmp_path_factory.mktemp("networks"))}
    if SHARED_YOLOX.is_file():
        found["yolox_nano"] = fetch(entries["yolox_nano"], SHARED, source=SHARED_YOLOX, sha256=SHARED_YOLOX_SHA256)
    return found


@pytest.fixture(scope="session")
def settings(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings for this session's Triton, its ports and logs away from a server that may be running here."""
    home = tmp_path_factory.mktemp("triton")
    for folder in ("server", "python"):
        (home / folder).symlink_to(ROOT / ".triton" / folder)
    http, grpc, metrics = free_port(), free_port(), free_port()
    return Settings(
        model_repository=str(repository),
        triton_home=str(home),
        triton_http_port=http,
        triton_grpc_port=grpc,
        triton_metrics_port=metrics,
        timeout_seconds=30,
        log_level="error",
    )


@pytest.fixture(scope="session")
def triton(settings: Settings) -> Iterator[embedded.Server]:
    """Run the embedded Triton."""
    server = embedded.Server(settings)
    server.start()
    yield server
    server.stop()
    assert not list(Path("/dev/shm").glob(f"nereid_{settings.triton_grpc_port}_*"))  # noqa: S108


@pytest.fixture(scope="session")
async def client(settings: Settings, triton: embedded.Server) -> AsyncIterator[httpx.AsyncClient]:
    """Call the application, its Triton running."""
    assert triton.poll() is None
    async with started(create_app(settings)) as client:
        yield client


def picture(name: str) -> bytes:
    """Read one of the project's sample pictures."""
    return (PICTURES / name).read_bytes()


def json(response: httpx.Response, status: int = 200) -> Any:  # noqa: ANN401
    """Take the JSON of an answer that must have this status."""
    assert response.status_code == status, response.text
    return response.json()
