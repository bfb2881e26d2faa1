"""The parts put together: routes, dependencies, errors and the life of a worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from app.api import application
from app.api.application import Application
from app.pipeline.detector import Detector, Limits
from app.triton.client import TritonClient
from app.triton.transport import Transport
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, json, lifespan_of, started


class Worker:
    """Opens what an application owns, and notes when."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fails = False
        self.events: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[TritonClient, Detector]]:
        """Open a client and a detector."""
        if self.fails:
            raise OSError
        client = TritonClient(self.url)
        detector = Detector(client, Transport(client, "inline"), "tiny", frozenset(), Limits(1, 10**6, 10))
        self.events.append("opened")
        yield client, detector
        self.events.append("closed")
        await detector.close()
        await client.close()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    fake = FakeTriton()
    async with serving(fake):
        yield Worker(fake.url)


def build(worker: Worker) -> Application:
    return application.build(worker.open, 2**20)


async def test_a_worker_is_opened_before_the_first_request_and_closed_after_the_last(worker: Worker) -> None:
    """Once, however many requests there are."""
    app = build(worker)
    assert worker.events == []
    async with started(app) as client:
        assert worker.events == ["opened"]
        for _ in range(3):
            json(await client.get("/readyz"))
        assert worker.events == ["opened"]

    assert worker.events == ["opened", "closed"]


async def test_an_application_may_be_started_again(worker: Worker) -> None:
    """It then gets a new worker."""
    app = build(worker)
    for _ in range(2):
        async with lifespan_of(app):
            pass

    assert worker.events == ["opened", "closed"] * 2


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_every_route_exists_with_and_without_its_version(worker: Worker, prefix: str) -> None:
    """The prefix changes nothing."""
    async with started(build(worker)) as client:
        for path in ("/livez", "/readyz", "/health", "/models"):
            assert (await client.get(prefix + path)).status_code == 200
        for path in ("/detect", "/predict/tiny"):
            assert json(await client.post(prefix + path, content=SCENE), 502)["code"] == "invalid_model_output"


async def test_the_documentation_is_not_versioned(worker: Worker) -> None:
    """There is one of it."""
    async with started(build(worker)) as client:
        assert (await client.get("/docs")).status_code == 200
        assert (await client.get("/v1/docs")).status_code == 404


@pytest.mark.parametrize("path", ["/", "/predict", "/predict/a/b", "/v2/detect", "/schema", "/detect/x"])
async def test_other_paths_do_not_exist(worker: Worker, path: str) -> None:
    """Every miss is a problem."""
    async with started(build(worker)) as client:
        response = await client.get(path)

    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


async def test_every_response_has_the_headers_of_the_middleware(worker: Worker) -> None:
    """It is the outermost layer."""
    async with started(build(worker)) as client:
        for path in ("/livez", "/nowhere", "/docs", "/docs-assets/nothing"):
            headers = (await client.get(path)).headers
            assert {"x-request-id", "x-process-time", "server-timing"} <= set(headers)


async def test_a_worker_that_cannot_be_opened_fails_the_start(worker: Worker) -> None:
    """The server is told, and does not serve."""
    worker.fails = True
    sent: list[str] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, str]) -> None:
        sent.append(message["type"])

    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    with suppress(Exception):  # Litestar raises the failure, too, in a group
        await build(worker)(scope, receive, send)  # type: ignore[arg-type]

    assert sent == ["lifespan.startup.failed"]
    assert worker.events == []
