"""Liveness, readiness and the health report, whatever state Triton is in."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from structlog.testing import CapturedCall

from app import __version__
from app.api import application, middleware
from app.host.packages import has_pillow_simd
from app.host.processes import DRAIN_SIGNAL
from app.pipeline.detector import Detector
from app.triton.client import ServerInfo, TritonClient
from app.triton.transport import Transport
from tests.fakes.triton import CONFIG, FakeTriton, serving
from tests.support import BODY_LIMITS, LIMITS, captured_log, eventually, json, open_admission, started

Gateway = tuple[FakeTriton, httpx.AsyncClient]
REFUSAL = grpc.StatusCode.UNAVAILABLE, "failed to connect"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    """The lines of the requests."""
    return captured_log(monkeypatch, middleware)


async def test_liveness_does_not_depend_on_triton(gateway: Gateway, lonely: httpx.AsyncClient) -> None:
    """A worker that answers is alive; killing it would not help."""
    fake, client = gateway
    fake.query_refusal = REFUSAL

    for one in (client, lonely):
        assert json(await one.get("/livez")) == {"status": "alive"}


async def test_readiness_is_that_of_the_default_model(gateway: Gateway) -> None:
    """Triton is asked each time."""
    fake, client = gateway
    assert json(await client.get("/readyz")) == {"status": "ready"}
    fake.is_model_ready = False
    response = await client.get("/readyz")

    assert json(response, 503) == {"status": "not_ready"}
    assert response.headers["retry-after"] == "1"
    fake.is_model_ready = True
    assert json(await client.get("/readyz")) == {"status": "ready"}


async def test_nothing_is_ready_without_triton(lonely: httpx.AsyncClient) -> None:
    """It says when to ask again."""
    response = await lonely.get("/readyz")

    assert json(response, 503) == {"status": "not_ready"}
    assert response.headers["retry-after"] == "1"


async def test_nothing_is_ready_before_a_stop(gateway: Gateway) -> None:
    """A load balancer sends no more requests then, but those that come are answered, and the worker is alive."""
    _, client = gateway
    assert signal.getsignal(DRAIN_SIGNAL) is not signal.SIG_DFL  # it would end this process
    os.kill(os.getpid(), DRAIN_SIGNAL)
    response = await client.get("/readyz")
    for _ in range(100):
        if response.status_code == 200:
            response = await client.get("/readyz")

    assert json(response, 503) == {"status": "not_ready"}
    assert response.headers["retry-after"] == "1"
    assert json(await client.get("/livez")) == {"status": "alive"}
    assert json(await client.get("/models"))["default"] == "tiny"


async def test_a_healthy_gateway_says_so(gateway: Gateway) -> None:
    """The answer has everything that a person or a dashboard wants to see."""
    _, client = gateway
    response = await client.get("/health")
    report = json(response)

    memory = report["memory"].pop("rss_mb")
    assert 10 < memory < 10_000
    assert report == {
        "status": "healthy",
        "version": __version__,
        "api": "healthy",
        "triton": {"status": "ready", "version": "2.51.0"},
        "model": "tiny",
        "model_ready": True,
        "gpu": False,
        "memory": {},
        "performance": {"memory_mb": memory, "optimizations": {"pillow_simd": has_pillow_simd(), "transport": "shm"}},
    }
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(("kind", "gpu"), [("KIND_GPU", True), ("KIND_CPU", False)])
async def test_the_device_is_that_of_the_default_model(kind: str, gpu: bool) -> None:  # noqa: FBT001
    """Its config says where it runs."""
    fake = FakeTriton()
    fake.config = {**CONFIG, "instance_group": [{"kind": kind}]}
    async with gateway_to(fake) as (client, _):
        assert json(await client.get("/health"))["gpu"] is gpu


async def test_a_model_that_is_not_ready_is_unhealthy(gateway: Gateway) -> None:
    """Triton answers, but no detection is possible."""
    fake, client = gateway
    fake.is_model_ready = False
    response = await client.get("/health")
    report = json(response, 503)

    assert (report["status"], report["api"], report["model_ready"]) == ("unhealthy", "healthy", False)
    assert report["triton"] == {"status": "not_ready", "version": "2.51.0"}
    assert response.headers["retry-after"] == "1"


async def test_a_model_without_an_adapter_is_unhealthy(log: list[CapturedCall]) -> None:
    """It is loaded, but cannot be used; the log says why."""
    fake = FakeTriton()
    fake.config = {**CONFIG, "output": []}
    async with gateway_to(fake) as (client, _):
        report = json(await client.get("/health"), 503)

    assert (report["status"], report["model_ready"], report["triton"]["status"]) == ("unhealthy", False, "not_ready")
    assert log[-1].kwargs["detail"].startswith("no adapter fits tiny")


async def test_a_triton_that_does_not_answer_is_unreachable(lonely: httpx.AsyncClient, log: list[CapturedCall]) -> None:
    """Its version is unknown; the report is complete all the same."""
    response = await lonely.get("/health")
    report = json(response, 503)

    assert report["triton"] == {"status": "unreachable", "version": None}
    assert (report["status"], report["api"], report["model_ready"]) == ("unhealthy", "healthy", False)
    assert report["performance"]["optimizations"]["transport"] == "inline"
    assert response.headers["retry-after"] == "1"
    assert log[-1].kwargs["detail"] == "Triton does not answer"


async def test_asking_for_health_changes_nothing() -> None:
    """The report has the version of today; whether an inference may be cancelled depends on the connection alone."""
    fake = FakeTriton()
    async with gateway_to(fake) as (client, triton):
        assert await eventually(lambda: triton.server == ServerInfo("2.51.0"))
        fake.version = "2.59.1"

        assert json(await client.get("/health"))["triton"]["version"] == "2.59.1"
        assert triton.server == ServerInfo("2.51.0")


@asynccontextmanager
async def gateway_to(fake: FakeTriton) -> AsyncIterator[tuple[httpx.AsyncClient, TritonClient]]:
    """Serve a fake as it is, and run an application on it; yields a client of that, and its Triton client."""
    async with serving(fake):
        triton = TritonClient(fake.url)
        with open_admission() as admission:
            detector = Detector(triton, Transport(triton, "inline"), admission, "tiny", frozenset(), LIMITS)

            @asynccontextmanager
            async def open_resources() -> AsyncIterator[tuple[TritonClient, Detector]]:
                yield triton, detector

            async with started(application.build(open_resources, BODY_LIMITS)) as client:
                yield client, triton
            await detector.close()
            await triton.close()
