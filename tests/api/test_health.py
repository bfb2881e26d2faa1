"""Liveness, readiness, the health report and metrics, whatever state Triton is in."""

from pathlib import Path

import grpc
import httpx
import pytest
from structlog.testing import CapturedCall

from app import __version__, main
from app.api.application import Application
from app.api.caller import keys
from app.resilience import last_valid
from app.telemetry.timing import STAGES
from tests.api.conftest import Gateway, client_for
from tests.fakes.triton import FakeTriton
from tests.support import SCENE, Samples, call, captured_log, chunk, json, read_samples, receiving, scrape
from tests.world import time_of_app


async def test_default_model_that_triton_does_not_have_is_told_of(log: list[CapturedCall], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTriton()
    fake.index, fake.is_model_ready = [("yolo11n", "1", "READY", "")], False
    fake.model_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model"
    reason = "Triton does not have tiny, a default model of the settings; it has yolo11n"
    at_start = captured_log(monkeypatch, main)
    async with client_for(fake) as client:
        assert json(await client.get("/ready"), 503)["services"]["triton"]["detail"] == reason
        assert json(await client.get("/health"), 503)["detail"] == reason
        assert json(await client.post("/detect", content=SCENE), 404)["detail"] == reason

    assert [call.kwargs["detail"] for call in at_start] == [reason]
    assert {call.kwargs["detail"] for call in log} == {reason}


async def test_state_of_triton_is_reported_and_liveness_does_not_depend_on_it(
    gateway: Gateway, lonely: httpx.AsyncClient, log: list[CapturedCall]
) -> None:
    """Restarting a worker would not bring Triton back."""
    fake, client = gateway
    report = json(await client.get("/ready"))
    triton = {"ok": True, "detail": "ready", "url": fake.url}
    assert 10 < report.pop("resources")["memory_mb"] < 10_000
    assert report == {"status": "ready", "version": __version__, "api_version": "v1", "services": {"triton": triton}}
    fake.is_model_ready = False
    assert json(await client.get("/health"), 503)["detail"] == "tiny is not ready in Triton, or its inferences fail"
    for one, is_there in ((client, True), (lonely, False)):
        probed = await one.get("/readyz")
        assert (json(probed, 503), probed.headers["retry-after"]) == ({"status": "not_ready"}, "1")
        assert json(await one.get("/ready"), 503)["services"]["triton"]["ok"] is is_there
        assert json(await one.get("/livez")) == json(await one.get("/live")) == {"status": "alive"}
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    for one in (client, lonely):
        response = await one.get("/health")
        report = json(response, 503)
        assert (report["status"], report["api"], report["triton"]) == ("unhealthy", "healthy", "unhealthy")
        assert (report["tritons"][0]["status"], report["tritons"][0]["version"]) == ("unreachable", None)
        assert report["detail"] == log[-1].kwargs["detail"] == "Triton unavailable"
        assert response.headers["retry-after"] == "1"


async def test_healthy_gateway_says_so() -> None:
    limits = {"max_file_size_mb": 7.0, "max_megapixels": 9.0, "timeout_seconds": 3.0, "memory_mb": 900, "max_uploads": 5}
    async with client_for(fake := FakeTriton(), **limits) as client:
        with time_of_app() as time:
            while not json(await client.get("/health"))["performance"]["memory_mb"]:  # workers tell it once a second
                await time.skip(1)
        report = json(await client.get("/health"))

    assert 10 < (memory_mb := report["performance"]["memory_mb"]) < 10_000
    assert report["memory"] == {"workers_mb": [memory_mb]}
    assert {name: report["limits"][name] for name in limits} == limits
    assert report["limits"]["requests"]["tiny"] >= 1
    (triton,) = report["tritons"]
    assert 0 <= triton.pop("share") <= 1
    described = {"address": fake.url, "status": "ready", "version": "2.51.0", "transport": "shm"}
    assert triton == {**described, "left_out": [], "wrong": []}
    assert [report[name] for name in ("status", "api", "triton", "detail", "model")] == ["healthy"] * 3 + [None, "tiny"]
    assert report["workers"]["running"] == 1


async def test_change_of_the_keys_holds_at_once_unless_the_file_is_not_valid_which_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_valid, "_CHECK_SECONDS", 0)
    credential, table = keys.create("operator")
    valid = table.replace("detect", "health")
    (file := tmp_path / "keys.toml").write_text(valid, encoding="utf-8")
    async with client_for(FakeTriton(), api_keys_file=str(file)) as client:
        client.headers["authorization"] = f"Bearer {credential}"

        async def told() -> tuple[list[str], float]:
            samples = read_samples((await client.get("/metrics")).text)
            return json(await client.get("/health"))["refused_files"], samples['api_refused_files{file="api_keys"}']

        assert (await client.get("/metrics")).headers["content-type"].count("charset") == 1
        for text, expected in (("", (["api_keys"], 1)), (valid, ([], 0))):
            file.write_text(text, encoding="utf-8")
            with time_of_app() as time:
                while await told() != expected:
                    await time.skip(1)
        file.write_text(keys.create("operator")[1].replace("detect", "health"), encoding="utf-8")
        assert (await client.get("/health")).status_code == 401


def requests(endpoint: str, status: int) -> str:
    return f'api_requests_total{{endpoint="{endpoint}",status="{status}"}}'


async def differences(client: httpx.AsyncClient, before: Samples) -> Samples:
    """Return what has changed since `before`, without the effects of scraping."""
    after = await scrape(client)
    changed = {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
    return {name: value for name, value in changed.items() if "/metrics" not in name}


async def test_requests_count_with_route_and_status(shared_app: Application, reader: httpx.AsyncClient) -> None:
    """A caller chooses the path, so the path itself is in no metric."""
    for method, path, endpoint, status in (
        ("GET", "/v1/models", "/v1/models", 200),
        ("GET", "/nowhere", "unmatched", 404),
        ("POST", "/v1/predict/tiny/?confidence=2", "/v1/predict/{model}", 400),
        ("PUT", "/predict/tiny", "/predict/{model}", 405),
        ("LEAVE", "/detect", "/detect", 499),  # nobody receives this status, but the request is no success
    ):
        before = await scrape(reader)
        if method == "LEAVE":
            await call(shared_app, receiving(chunk(b"x", more=True)), path, {"content-type": "image/png", "content-length": "1000"})
        else:
            assert (await reader.request(method, path, headers={"content-type": "image/png"})).status_code == status
        changed = await differences(reader, before)

        counted = {name: value for name, value in changed.items() if name.startswith("api_requests_total")}
        assert counted == {requests(endpoint, status): 1}
        assert changed[f'api_request_duration_seconds_count{{endpoint="{endpoint}"}}'] == 1
        assert changed.get('api_errors_total{code="client_gone"}', 0) == (status == 499)
        assert "api_active_requests" not in changed


async def test_detection_counts_in_every_stage_and_a_retry_by_its_reason(gateway: Gateway) -> None:
    fake, client = gateway
    fake.find_nothing()
    before = await scrape(client)
    fake.next_refusals = [(grpc.StatusCode.UNAVAILABLE, "Socket closed")]
    assert (await client.post("/detect", content=SCENE)).status_code == 200

    changed = await differences(client, before)
    assert changed[requests("/detect", 200)] == 1
    assert {stage: changed[f'api_stage_duration_seconds_count{{stage="{stage}"}}'] for stage in STAGES} == dict.fromkeys(STAGES, 1)
    assert changed['api_inferences_total{transport="shm"}'] == 1
    retries = {name: value for name, value in changed.items() if name.startswith("api_retries")}
    assert retries == {'api_retries_total{reason="disconnected"}': 1}
    assert not {name for name in changed if name.startswith(("api_errors", "api_rejections", "api_deadlines"))}
