"""The parts put together: routes, dependencies, errors and the life of a worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from app.api import application
from app.api.application import Application
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from tests.support import DEPLOYMENT, METRICS, json, lifespan_of, started
from tests.world import open_world


class Worker:
    """A stub worker that records when its resources are opened and closed."""

    def __init__(self) -> None:
        self.fails = False
        self.events: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
        if self.fails:
            raise OSError
        async with open_world(mode="inline") as world:
            self.events.append("opened")
            yield world.pool, world.pipeline, METRICS
            self.events.append("closed")


@pytest.fixture
def worker() -> Worker:
    return Worker()


def build(worker: Worker) -> Application:
    return application.build(worker.open, DEPLOYMENT)


async def start_and_fail(app: Application) -> str:
    """Start an application whose start fails, and return what the server is told."""
    sent: list[dict[str, str]] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, str]) -> None:
        sent.append(message)

    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    with suppress(Exception):  # Litestar raises the failure, too, in a group
        await app(scope, receive, send)  # type: ignore[arg-type]
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    return message["message"]


async def test_a_worker_is_opened_before_the_first_request_and_closed_after_the_last(worker: Worker) -> None:
    app = build(worker)
    assert worker.events == []
    async with started(app) as client:
        assert worker.events == ["opened"]
        for _ in range(3):
            json(await client.get("/readyz"))
        assert worker.events == ["opened"]

    assert worker.events == ["opened", "closed"]


async def test_an_application_can_be_started_only_once(worker: Worker) -> None:
    """A second lifespan fails with a clear error, because the cached dependencies are those of the first one."""
    app = build(worker)
    async with lifespan_of(app):
        pass

    assert "this application was started before; build another one" in await start_and_fail(app)
    assert worker.events == ["opened", "closed"]


async def test_a_worker_that_cannot_be_opened_fails_the_start(worker: Worker) -> None:
    worker.fails = True

    assert "OSError" in await start_and_fail(build(worker))
    assert worker.events == []
