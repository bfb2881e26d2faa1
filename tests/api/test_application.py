"""The life of a worker: what it uses is opened before the first request, and closed after the last."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from app.api import application
from app.api.application import Application
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from tests.support import DEPLOYMENT, METRICS, json, started
from tests.world import open_world


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


async def test_worker_is_opened_before_the_first_request_and_closed_after_the_last() -> None:
    """The application cannot be started again, because the cached dependencies are those of the first lifespan."""
    events: list[str] = []

    @asynccontextmanager
    async def open_resources() -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
        async with open_world(mode="inline") as world:
            events.append("opened")
            yield world.pool, world.pipeline, METRICS
            events.append("closed")

    app = application.build(open_resources, DEPLOYMENT)
    assert events == []
    async with started(app) as client:
        for _ in range(3):
            json(await client.get("/readyz"))
        assert events == ["opened"]

    assert events == ["opened", "closed"]
    assert "this application was started before; build another one" in await start_and_fail(app)
    assert events == ["opened", "closed"]


async def test_worker_that_cannot_be_opened_fails_the_start() -> None:
    def fail() -> Any:  # noqa: ANN401
        raise OSError

    assert "OSError" in await start_and_fail(application.build(fail, DEPLOYMENT))
