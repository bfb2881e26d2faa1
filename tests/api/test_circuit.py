"""Requests are rejected while Triton is known not to run their model: guards, bodies, dialects, probes and readiness together."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import numpy as np
import pytest

from app.api.application import Application
from app.main import create_app
from tests.api.conftest import post_unread, settings_for
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.scrape import scrape
from tests.support import SCENE, Reply, call, calling, eventually, json, lifespan_of, staying, until

HEADERS = {"Content-Type": "image/bmp", "Content-Length": "100"}
TINY = ["/detect", "/predict/tiny", "/v1/detect?model=tiny", "/detect/", "//v1//predict/tiny", "/detect?model_name=tiny"]
OTHER = ["/predict/other", "/v1/predict/other", "/detect?model=other", "/detect?confidence=0.5&model_name=other"]


class SickTriton(FakeTriton):
    def __init__(self) -> None:
        super().__init__()
        self.sick = ""
        """Name of the model."""
        self.sick_version = ""
        """The version of it that it cannot run; empty for the one that it chooses itself."""
        self.answer = infer_response(output0=np.zeros((2, 6), np.float32))
        self.model_versions = ["1", "2"]

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if (request.model_name, request.model_version) == (self.sick, self.sick_version):
            await context.abort(grpc.StatusCode.INTERNAL, "Stub process is not healthy.")
        return await super().ModelInfer(request, context)


Gateway = tuple[SickTriton, Application]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    fake = SickTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url))):
        yield fake, app
        fake.sick = ""


async def post(app: Application, path: str, headers: dict[str, str] | None = None) -> Reply:
    body = {"type": "http.request", "body": SCENE, "more_body": False}
    return await call(app, staying(body), path, headers or {})


async def break_model(gateway: Gateway, model: str, headers: dict[str, str] | None = None) -> None:
    fake, app = gateway
    fake.sick = model
    for _ in range(5):
        reply = await post(app, f"/predict/{model}", headers)
        assert (reply.status, reply.problem["code"]) == (503, "triton_unavailable")


async def mend(gateway: Gateway, path: str) -> None:
    fake, app = gateway
    fake.sick = ""

    async def is_mended() -> bool:
        return (await post(app, path)).status == 200

    await until(is_mended)


@pytest.mark.parametrize(("sick", "rejected", "accepted"), [("tiny", TINY, OTHER), ("other", OTHER, TINY)])
async def test_a_request_for_a_model_that_fails_is_rejected_before_the_body_is_read(
    gateway: Gateway, sick: str, rejected: list[str], accepted: list[str]
) -> None:
    await break_model(gateway, sick)
    _, app = gateway
    for path in rejected:
        reply = await post_unread(app, path, HEADERS)
        assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (503, "circuit_open", "1")
        assert reply.problem["title"] == "The model has failed repeatedly"
    for path in accepted:
        assert (await post(app, path)).status == 200

    await mend(gateway, rejected[0])
    assert [(await post(app, path)).status for path in rejected] == [200] * len(rejected)


async def test_the_default_model_does_not_matter_to_a_dialect_whose_body_names_another(gateway: Gateway) -> None:
    await break_model(gateway, "tiny")
    _, app = gateway
    image = {"type": "base64", "value": base64.b64encode(SCENE).decode()}
    async with calling(app) as client:
        for content, status in (({"model_id": "other"}, 200), ({"model_id": "tiny"}, 503), ({}, 503)):
            answer = json(await client.post("/infer/object_detection", json={**content, "image": image}), status)
            assert status == 200 or answer["status"] == status
        assert (await client.post("/tiny/2", content=SCENE)).json()["status"] == 503


@pytest.mark.parametrize(("sick", "sound"), [("", "1"), ("1", ""), ("1", "2")])
async def test_a_version_that_fails_stops_no_other(gateway: Gateway, sick: str, sound: str) -> None:
    """Each version, also the newest, has a circuit of its own, so that callers can go back to the version before."""
    fake, app = gateway
    fake.sick, fake.sick_version = "tiny", sick
    for _ in range(5):
        assert (await post(app, f"/detect?version={sick}" if sick else "/detect")).status == 503
    for path in ("/detect?", "/predict/tiny?", "/detect?model=tiny&"):
        reply = await post_unread(app, path + (f"version={sick}" if sick else ""), HEADERS)
        assert (reply.status, reply.problem["code"]) == (503, "circuit_open")
        assert (await post(app, path + (f"version={sound}" if sound else ""))).status == 200


async def test_callers_can_go_back_from_a_newer_version_that_fails(gateway: Gateway) -> None:
    """Requests without a version used the circuit of the newest version until another one was loaded."""
    fake, app = gateway
    assert (await post(app, "/detect?version=2")).status == 200
    assert [request.model_version for request in fake.requests] == ["", "2"]  # the first one is that of the start
    fake.model_versions = ["1", "2", "3"]
    fake.sick = "tiny"
    replies = [await post(app, "/detect") for _ in range(6)]

    assert replies[-1].problem["code"] == "circuit_open"
    assert (await post(app, "/detect?version=2")).status == 200
    assert (await post(app, "/detect")).status == 503


@pytest.mark.parametrize("kind", ["form", "json"])
async def test_the_default_model_is_not_that_of_a_body_that_names_another_one(gateway: Gateway, kind: str) -> None:
    await break_model(gateway, "tiny")
    _, app = gateway
    async with calling(app) as client:

        async def send(path: str = "/detect", **fields: str) -> tuple[int, str]:
            if kind == "form":
                answer = await client.post(path, files={"image": SCENE}, data=fields)
            else:
                answer = await client.post(path, json={"image": base64.b64encode(SCENE).decode(), **fields})
            return answer.status_code, answer.json().get("code", "")

        assert await send(model="other") == (200, "")
        assert await send("/predict/other") == (200, "")
        assert await send() == await send(model="tiny") == await send("/predict/tiny") == (503, "circuit_open")
    content_type = "multipart/form-data; boundary=x" if kind == "form" else "application/json"
    for path in TINY[1:2] + TINY[2:3] + TINY[5:]:
        reply = await post_unread(app, path, {"Content-Type": content_type, "Content-Length": "100"})
        assert (reply.status, reply.problem["code"]) == (503, "circuit_open")


async def test_the_reason_is_the_model_although_the_gateway_is_full() -> None:
    """Inferences that hang have filled the gateway; 503 instead of 429 tells callers that the model is the reason."""
    fake = SickTriton()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(fake))
        fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
        app = create_app(settings_for(fake.url, max_requests=5, timeout_seconds=0.5, calls_in_flight=10))
        await stack.enter_async_context(lifespan_of(app))
        stack.callback(fake.may_answer.set)
        fake.query_refusal = None
        fake.may_answer.clear()
        while fake.running < 5:  # a request that is late before its inference begins leaves nothing that hangs
            late = [post(app, "/detect?timeout_ms=100") for _ in range(5 - fake.running)]
            assert {reply.status for reply in await asyncio.gather(*late)} == {504}
        await eventually(lambda: fake.running == 6)  # which is the probe
        async with calling(app) as client:
            assert (await scrape(client))['api_model_active_requests{model="tiny"}'] == 5
        for path in ("/detect", "/predict/tiny", "/detect?model=tiny"):
            reply = await post_unread(app, path, HEADERS)
            assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (503, "circuit_open", "1")
        fake.may_answer.set()

        await mend((fake, app), "/detect")


async def test_readiness_depends_on_the_circuit_of_the_default_model(gateway: Gateway) -> None:
    """A gateway whose default model fails gets no more requests from a load balancer, although Triton says that it is ready."""
    _, app = gateway
    async with calling(app) as client:
        await break_model(gateway, "other")
        assert (await client.get("/readyz")).status_code == 200
        await mend(gateway, "/predict/other")
        await break_model(gateway, "tiny")
        for path in ("/readyz", "/v1/readyz"):
            response = await client.get(path)
            assert json(response, 503) == {"status": "not_ready"}
            assert response.headers["retry-after"] == "1"
        report = json(await client.get("/health"), 503)
        assert (report["status"], report["triton"], report["tritons"][0]["status"]) == ("unhealthy", "healthy", "not_ready")
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/models")).status_code == 200

        await mend(gateway, "/detect")
        assert json(await client.get("/readyz")) == {"status": "ready"}
        assert json(await client.get("/health"))["status"] == "healthy"


async def test_an_image_that_is_rejected_says_nothing_about_the_model(gateway: Gateway) -> None:
    _, app = gateway
    body = {"type": "http.request", "body": b"no image", "more_body": False}
    for _ in range(30):
        assert (await call(app, staying(body), "/detect")).status == 415

    assert (await post(app, "/detect")).status == 200
