"""The parts put together: routes, dependencies, errors and the life of a worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from app.api import application
from app.api.application import Application
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from tests.support import DEPLOYMENT, METRICS, json, lifespan_of, started
from tests.world import open_world


class Worker:
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
    """The cached dependencies are those of the first lifespan."""
    app = build(worker)
    async with lifespan_of(app):
        pass

    assert "this application was started before; build another one" in await start_and_fail(app)
    assert worker.events == ["opened", "closed"]


async def test_a_worker_that_cannot_be_opened_fails_the_start(worker: Worker) -> None:
    worker.fails = True

    assert "OSError" in await start_and_fail(build(worker))
    assert worker.events == []


class StubPool(TritonPool):
    """A pool without Tritons that records the models it was asked about."""

    def __init__(self) -> None:  # there is nothing to initialise
        self.asked: list[str] = []

    async def is_ready(self, model: str) -> bool:
        self.asked.append(model)
        return True


async def test_two_applications_in_one_process_do_not_share_dependencies() -> None:
    pools = StubPool(), StubPool()

    def build_with(pool: StubPool, model: str) -> Application:
        pipeline = Mock(read_default_reference=AsyncMock(return_value=model))
        return application.build(lambda: nullcontext((pool, pipeline, METRICS)), DEPLOYMENT)

    first, second = build_with(pools[0], "a"), build_with(pools[1], "b")
    async with started(first) as of_first, started(second) as of_second:
        for client in (of_first, of_second, of_first):
            json(await client.get("/readyz"))

    assert [pool.asked for pool in pools] == [["a", "a"], ["b"]]
