"""Handlers get what their own application's worker owns."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.api import application
from app.api.application import Application
from app.api.dependencies import WorkerResources
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from app.triton.server_info import ModelState
from tests.support import DEPLOYMENT, METRICS, json, started


class StubPool(TritonPool):
    """A pool without Tritons that records the models it was asked about."""

    def __init__(self) -> None:  # there is nothing to initialise
        self.asked: list[str] = []

    async def is_ready(self, model: str) -> bool:
        self.asked.append(model)
        return True

    async def list_models(self) -> dict[str, ModelState]:
        self.asked.append("*")
        return {}


class StubPipeline(Pipeline):
    """A pipeline that has nothing but a default model, with which nothing has failed."""

    def __init__(self, default_model: str) -> None:
        self.default_model = default_model
        self.pullable = frozenset()

    def is_usable(self, model: str) -> bool:
        return model == self.default_model


def build(tritons: StubPool, model: str) -> Application:
    @asynccontextmanager
    async def open_resources() -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
        yield tritons, StubPipeline(model), METRICS

    return application.build(open_resources, DEPLOYMENT)


async def test_dependencies_are_provided_once_per_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's Tritons are looked up once, however many requests and routes use them."""
    provided: list[str] = []

    class CountingResources(WorkerResources):
        def __getattribute__(self, name: str) -> Any:  # noqa: ANN401
            provided.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(application, "WorkerResources", CountingResources)
    triton = StubPool()
    async with started(build(triton, "a")) as client:
        provided.clear()  # the lifespan has looked, too
        for path in ("/models", "/v1/models", "/models"):
            assert json(await client.get(path))["default"] == "a"

    assert provided.count("tritons") == 1
    assert triton.asked == ["*", "*", "*"]


async def test_two_applications_in_one_process_do_not_share_dependencies() -> None:
    """Each asks its own Triton about its own model, also when their requests alternate."""
    first, second = StubPool(), StubPool()
    async with started(build(first, "a")) as of_first, started(build(second, "b")) as of_second:
        for client in (of_first, of_second, of_first):
            json(await client.get("/readyz"))

    assert (first.asked, second.asked) == (["a", "a"], ["b"])
