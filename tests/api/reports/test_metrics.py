"""GET /metrics: everything that happens to requests is counted, with the status that the caller saw."""

import asyncio
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from app.api.application import Application
from app.host.memory import resident_bytes
from app.main import create_app
from app.telemetry.timing import STAGES
from tests.api.conftest import settings_for
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.scrape import Samples, scrape
from tests.support import SCENE, call, chunk, eventually, receiving, started, until

Gateway = tuple[FakeTriton, httpx.AsyncClient]


@pytest.fixture
def gateway(gateway: Gateway) -> Gateway:
    gateway[0].answer = infer_response(output0=np.zeros((2, 6), np.float32))
    return gateway


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
        ("PUT", "/v1/predict/x", "/v1/predict/{model}", 405),
        ("POST", "/predict/tiny?confidence=2", "/predict/{model}", 400),
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


@pytest.mark.parametrize("refusals", [[], [(grpc.StatusCode.UNAVAILABLE, "Socket closed")]], ids=["answered", "retried"])
async def test_detection_counts_in_every_stage_and_a_retry_by_its_reason(gateway: Gateway, refusals: list[Any]) -> None:
    fake, client = gateway
    before = await scrape(client)
    fake.next_refusals = [*refusals]
    assert (await client.post("/detect", content=SCENE)).status_code == 200

    changed = await differences(client, before)
    assert changed[requests("/detect", 200)] == 1
    assert {stage: changed[f'api_stage_duration_seconds_count{{stage="{stage}"}}'] for stage in STAGES} == dict.fromkeys(STAGES, 1)
    assert changed['api_inferences_total{transport="shm"}'] == 1
    retries = {name: value for name, value in changed.items() if name.startswith("api_retries")}
    assert retries == ({'api_retries_total{reason="disconnected"}': 1} if refusals else {})
    assert not {name for name in changed if name.startswith(("api_errors", "api_rejections", "api_deadlines"))}


async def test_missed_deadline_counts_in_its_stage(gateway: Gateway) -> None:
    fake, client = gateway
    before = await scrape(client)
    fake.may_answer.clear()
    asked = 0
    while not fake.requests:  # on a busy machine it may pass before
        asked += 1
        assert (await client.post("/detect?timeout_ms=100", content=SCENE)).status_code == 504
    fake.may_answer.set()

    changed = await differences(client, before)
    missed = {stage: changed.get(f'api_deadlines_missed_total{{stage="{stage}"}}', 0) for stage in STAGES}
    assert sum(missed.values()) == changed[requests("/detect", 504)] == asked
    assert missed["infer"] >= 1


async def test_full_gateway_shows_what_is_in_use_and_counts_rejections_by_their_reason() -> None:
    fake = FakeTriton()
    async with serving(fake), started(create_app(settings_for(fake.url, max_requests=1))) as client:
        fake.may_answer.clear()
        fake.requests.clear()
        request = asyncio.create_task(client.post("/detect", content=SCENE))
        await eventually(lambda: fake.running == 1)
        found: Samples = {}

        async def shows_it() -> bool:
            found.update(await scrape(client))
            return found.get('api_model_active_requests{model="tiny"}') == 1

        await until(shows_it)
        before = await scrape(client)
        assert (await client.post("/v1/predict/tiny", content=SCENE)).status_code == 429
        changed = await differences(client, before)
        fake.may_answer.set()
        await request

    assert changed[requests("/v1/predict/{model}", 429)] == 1
    assert changed['api_rejections_total{reason="requests"}'] == 1
    assert changed['api_errors_total{code="gateway_full"}'] == 1
    assert found["api_active_requests"] == 2  # the scrape is one, too
    assert found['api_model_request_limit{model="tiny"}'] == 1
    assert found['api_model_waiting_requests{model="tiny"}'] == 0
    assert found["api_slots_in_use"] == 1 < found["api_slots"]
    assert found["api_workers"] == found["api_worker_starts_total"] == 1
    assert found['api_reserved_bytes{purpose="images"}'] >= 32 * 32 * 3
    assert found['api_reserved_bytes_limit{purpose="images"}'] > 10**7
    (memory,) = [value for name, value in found.items() if name.startswith("api_worker_memory_bytes")]
    assert 0.5 < memory / resident_bytes() < 2


async def test_triton_that_does_not_run_hides_no_metrics(lonely: httpx.AsyncClient) -> None:
    found: Samples = {}

    async def is_down() -> bool:
        found.update(await scrape(lonely))
        return [up for name, up in found.items() if name.startswith("triton_up{")] == [0]

    await until(is_down)
    assert found["api_workers"] == 1
    assert not {name for name in found if name.startswith("triton_batch")}


async def test_openmetrics_is_written_if_the_scraper_asks_for_it(reader: httpx.AsyncClient) -> None:
    """Newer versions of Prometheus insist on the content type."""
    assert (await reader.get("/metrics")).headers["content-type"].startswith("text/plain; version=")
    answer = await reader.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "api_requests" in {family.name for family in parse_openmetrics(answer.text)}  # type: ignore[no-untyped-call]
