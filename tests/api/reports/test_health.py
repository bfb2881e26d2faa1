"""Liveness, readiness and the health report, whatever state Triton is in."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import httpx
import pytest
from structlog.testing import CapturedCall

from app import __version__, main
from app.api.admission import middleware
from app.api.caller import keys
from app.host import cores
from app.host.packages import has_pillow_simd
from app.host.processes import DRAIN_SIGNAL
from app.main import create_app
from app.resilience import last_valid
from tests.api.conftest import settings_for
from tests.fakes.http import answering
from tests.fakes.triton import CONFIG, FakeTriton, serving
from tests.scrape import read_samples
from tests.support import SCENE, captured_log, json, started
from tests.world import time_of_app

Gateway = tuple[FakeTriton, httpx.AsyncClient]
REFUSAL = grpc.StatusCode.UNAVAILABLE, "failed to connect"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    return captured_log(monkeypatch, middleware)


async def test_default_model_that_triton_does_not_have_is_told_of(log: list[CapturedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTriton()
    fake.index, fake.is_model_ready = [("yolo11n", "1", "READY", "")], False
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"
    reason = "Triton does not have tiny, a default model of the settings; it has yolo11n"
    at_start = captured_log(monkeypatch, main)
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:
        assert json(await client.get("/ready"), 503)["services"]["triton"]["detail"] == reason
        assert json(await client.get("/health"), 503)["detail"] == reason
        assert json(await client.post("/detect", content=SCENE), 404)["detail"] == reason

    assert [call.kwargs["detail"] for call in at_start] == [reason]
    assert {call.kwargs["detail"] for call in log} == {reason}


async def test_readiness_is_reported_under_the_names_of_other_systems(gateway: Gateway, lonely: httpx.AsyncClient) -> None:
    """Liveness does not depend on Triton: restarting a worker would not bring it back."""
    fake, client = gateway
    report = json(await client.get("/ready"))
    resources = report.pop("resources")
    assert 10 < resources["memory_mb"] < 10_000
    assert 0 < resources["cpu_percent"] < 3200
    triton = {"ok": True, "detail": "ready", "url": fake.url}
    assert report == {"status": "ready", "version": __version__, "api_version": "v1", "services": {"triton": triton}}
    fake.is_model_ready = False
    assert json(await client.get("/ready"), 503)["services"] == {"triton": {**triton, "detail": "not_ready"}}
    for client_, is_there in ((client, True), (lonely, False)):
        probed = await client_.get("/readyz")
        assert json(probed, 503) == {"status": "not_ready"}
        assert probed.headers["retry-after"] == "1"
        alone = json(await client_.get("/ready"), 503)
        assert (alone["status"], alone["services"]["triton"]["ok"]) == ("not_ready", is_there)
        assert json(await client_.get("/livez")) == json(await client_.get("/live")) == {"status": "alive"}


async def test_worker_that_is_to_stop_is_alive_but_not_ready(gateway: Gateway) -> None:
    """A load balancer sends no more requests then, but those that come are answered."""
    _, client = gateway
    assert signal.getsignal(DRAIN_SIGNAL) is not signal.SIG_DFL  # it would end this process
    os.kill(os.getpid(), DRAIN_SIGNAL)
    response = await client.get("/readyz")
    for _ in range(100):
        if response.status_code == 200:
            response = await client.get("/readyz")

    assert json(response, 503) == {"status": "not_ready"}
    assert json(await client.get("/ready"), 503)["status"] == "not_ready"
    assert response.headers["retry-after"] == "1"
    assert json(await client.get("/livez")) == {"status": "alive"}
    assert json(await client.get("/models"))["default"] == "tiny"


async def test_healthy_gateway_says_so() -> None:
    limits = {"max_file_size_mb": 7.0, "max_megapixels": 9.0, "timeout_seconds": 3.0, "memory_mb": 900, "max_uploads": 5}
    async with serving(fake := FakeTriton()), started(create_app(settings_for(fake.url, **limits))) as client:
        with time_of_app() as time:
            while not json(await client.get("/health"))["performance"]["memory_mb"]:  # workers tell it once a second
                await time.skip(1)
        response = await client.get("/health")
    report = json(response)

    assert 10 < (memory_mb := report["performance"]["memory_mb"]) < 10_000
    assert report.pop("memory") == {"workers_mb": [memory_mb]}
    in_force = report.pop("limits")
    assert {name: in_force[name] for name in limits} == limits
    assert in_force["requests"]["tiny"] >= 1
    (triton,) = report.pop("tritons")
    assert 0 <= triton.pop("share") <= 1
    described = {"address": fake.url, "status": "ready", "version": "2.51.0", "transport": "shm"}
    assert triton == {**described, "left_out": [], "wrong": []}
    assert report == {
        "status": "healthy",
        "version": __version__,
        "api": "healthy",
        "triton": "healthy",
        "detail": None,
        "model": "tiny",
        "gpu": {"in_use": False, "devices": []},
        "performance": {
            "memory_mb": memory_mb,
            "optimizations": {
                "jpeg_decoder": "libjpeg-turbo",
                "classifier_resizer": "pillow-simd" if has_pillow_simd() else "pillow",
                "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
                "json": "msgspec",
            },
        },
        "workers": {"running": 1, "wanted": cores.workers(0, 0)},
        "refused_files": [],
        "failing_models": {},
        "model_deaths": {},
        "search": None,
    }
    assert "retry-after" not in response.headers


async def test_withdrawn_canaries_are_told(tmp_path: Path) -> None:
    canary = 'to = "tiny:1", canary = {to = "tiny:2", share = 0.1'
    withdrawn = f'gone = {{{canary}, withdrawn = "it failed"}}}}'
    (file := tmp_path / "routes.toml").write_text(f'tried = {{{canary}}}}}\n{withdrawn}\nplain = {{to = "tiny"}}')
    async with serving(fake := FakeTriton()), started(create_app(settings_for(fake.url, routes_file=str(file)))) as client:
        assert json(await client.get("/health"))["withdrawn_canaries"] == {"gone": "it failed"}


async def test_file_that_is_not_valid_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_valid, "_CHECK_SECONDS", 0)
    credential, table = keys.create("operator")
    valid = table.replace("detect", "health")
    (file := tmp_path / "keys.toml").write_text(valid, encoding="utf-8")
    fake = FakeTriton()

    async with serving(fake), started(create_app(settings_for(fake.url, api_keys_file=str(file)))) as client:
        client.headers["authorization"] = f"Bearer {credential}"

        async def told() -> tuple[list[str], float]:
            samples = read_samples((await client.get("/metrics")).text)
            return json(await client.get("/health"))["refused_files"], samples['api_refused_files{file="api_keys"}']

        for text, expected in (("", (["api_keys"], 1)), (valid, ([], 0))):
            file.write_text(text, encoding="utf-8")
            with time_of_app() as time:
                while await told() != expected:
                    await time.skip(1)


async def test_model_whose_process_has_died_is_told() -> None:
    fake = FakeTriton()
    fake.refusal = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:

        async def told(name: str) -> int:
            return int((await client.get("/health")).json()[name].get("tiny", 0))

        while not await told("model_deaths"):
            assert (await client.post("/detect", content=SCENE)).status_code == 503
        with time_of_app() as time:
            while not await told("failing_models"):
                await time.skip(1)


METRICS_OF_TRITON = """# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-b"} 0.25
nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5
# TYPE nv_gpu_memory_total_bytes gauge
nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 16000000000.000000
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 4200000000.000000
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.9
"""


@pytest.mark.parametrize(
    ("text", "status"),
    [(METRICS_OF_TRITON.encode(), 200), (METRICS_OF_TRITON.encode(), 500), (b"no metrics {", 200), (b"\xff", 200)],
)
async def test_gpus_are_those_of_the_metrics_of_triton_if_they_can_be_read(text: bytes, status: int) -> None:
    fake = FakeTriton()
    with answering(text, status) as url:
        async with serving(fake), started(create_app(settings_for(fake.url, triton_metrics_url=url))) as client:
            gpu = json(await client.get("/health"))["gpu"]

    assert gpu["devices"] == [
        {"id": "GPU-a", "utilization": 0.5, "memory_used_mb": 4200.0, "memory_total_mb": 16000.0},
        {"id": "GPU-b", "utilization": 0.25, "memory_used_mb": None, "memory_total_mb": None},
    ] * (text.startswith(b"#") and status == 200)


async def test_model_without_an_adapter_is_unhealthy(log: list[CapturedCall]) -> None:
    fake = FakeTriton()
    fake.config = {**CONFIG, "output": []}
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:
        report = json(await client.get("/health"), 503)

    assert report["status"] == "unhealthy"
    assert report["detail"] == log[-1].kwargs["detail"]
    assert report["detail"].startswith("the tensors of tiny match no supported head")


async def test_detail_says_why_a_gateway_that_was_healthy_is_not(
    gateway: Gateway, lonely: httpx.AsyncClient, log: list[CapturedCall]
) -> None:
    """The spec of the default model is known, so no question about it fails."""
    fake, client = gateway
    assert json(await client.get("/health"))["detail"] is None
    fake.is_model_ready = False
    assert json(await client.get("/health"), 503)["detail"] == "tiny is not ready in Triton, or its inferences fail"
    fake.query_refusal = REFUSAL
    for unreachable in (client, lonely):
        response = await unreachable.get("/health")
        report = json(response, 503)
        assert (report["status"], report["api"], report["triton"]) == ("unhealthy", "healthy", "unhealthy")
        assert (report["tritons"][0]["status"], report["tritons"][0]["version"]) == ("unreachable", None)
        assert response.headers["retry-after"] == "1"
        assert report["detail"] == log[-1].kwargs["detail"] == "Triton unavailable"
    assert json(await lonely.get("/health"), 503)["tritons"][0]["transport"] == "inline"
