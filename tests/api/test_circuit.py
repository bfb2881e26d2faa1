"""Requests are rejected while Triton is known not to run their model: guards, bodies, dialects, probes and readiness together."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from app.api.application import Application
from app.main import create_app
from tests.api.conftest import post_unread, settings_for
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, Reply, call, calling, chunk, json, lifespan_of, staying, until

BASE64 = base64.b64encode(SCENE).decode()


class SickTriton(FakeTriton):
    def __init__(self) -> None:
        super().__init__()
        self.sick, self.sick_version = "", ""
        """The model that it cannot run, and the version of it; empty for the one that it chooses itself."""
        self.answer = infer_response(output0=np.zeros((2, 6), np.float32))
        self.model_versions = ["1", "2"]

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if (request.model_name, request.model_version) == (self.sick, self.sick_version):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server is stopping")
        return await super().ModelInfer(request, context)


Gateway = tuple[SickTriton, Application]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    fake = SickTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url))):
        yield fake, app
        fake.sick = ""


async def post(app: Application, path: str) -> Reply:
    return await call(app, staying(chunk(SCENE)), path)


async def assert_rejected(app: Application, path: str, content_type: str = "image/bmp") -> None:
    reply = await post_unread(app, path, {"Content-Type": content_type, "Content-Length": "100"})
    assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (503, "circuit_open", "1")


async def break_model(gateway: Gateway, model: str, version: str = "") -> None:
    fake, app = gateway
    fake.sick, fake.sick_version = model, version
    for _ in range(5):
        reply = await post(app, f"/predict/{model}" + (f"?version={version}" if version else ""))
        assert (reply.status, reply.problem["code"]) == (503, "triton_unavailable")


async def mend(gateway: Gateway, path: str) -> None:
    gateway[0].sick = ""

    async def is_mended() -> bool:
        return (await post(gateway[1], path)).status == 200

    await until(is_mended)


async def test_default_model_does_not_matter_to_a_body_that_names_another_one(gateway: Gateway) -> None:
    await break_model(gateway, "tiny")
    async with calling(gateway[1]) as client:

        async def send(kind: str, **fields: str) -> int:
            form: dict[str, Any] = {"files": {"image": SCENE}, "data": fields}
            return (await client.post("/detect", **(form if kind == "form" else {"json": {"image": BASE64, **fields}}))).status_code

        for kind in ("form", "json"):
            assert [await send(kind, model="other"), await send(kind), await send(kind, model="tiny")] == [200, 503, 503]
        image = {"type": "base64", "value": BASE64}
        for content, status in (({"model_id": "other"}, 200), ({"model_id": "tiny"}, 503), ({}, 503)):
            json(await client.post("/infer/object_detection", json={**content, "image": image}), status)
    for content_type in ("multipart/form-data; boundary=x", "application/json"):
        await assert_rejected(gateway[1], "/v1/detect?model=tiny", content_type)


async def test_callers_can_go_back_from_a_newer_version_that_fails(gateway: Gateway) -> None:
    """Requests without a version once used the circuit of the newest version."""
    fake, app = gateway
    assert (await post(app, "/detect?version=2")).status == 200
    fake.model_versions = ["1", "2", "3"]
    await break_model(gateway, "tiny")

    await assert_rejected(app, "/detect")
    assert (await post(app, "/detect?version=2")).status == 200
    assert (await post(app, "/detect")).status == 503


async def test_readiness_depends_on_the_circuit_of_the_default_model(gateway: Gateway) -> None:
    """A gateway whose default model fails gets no more requests from a load balancer, although Triton says that it is ready."""
    async with calling(gateway[1]) as client:
        await break_model(gateway, "other")
        assert (await client.get("/readyz")).status_code == 200
        await mend(gateway, "/predict/other")
        await break_model(gateway, "tiny")
        assert json(await client.get("/v1/readyz"), 503) == {"status": "not_ready"}
        report = json(await client.get("/health"), 503)
        assert (report["status"], report["triton"], report["tritons"][0]["status"]) == ("unhealthy", "healthy", "not_ready")
        for path in ("/livez", "/models"):
            assert (await client.get(path)).status_code == 200

        await mend(gateway, "/detect")
        assert json(await client.get("/readyz")) == {"status": "ready"}
        assert json(await client.get("/health"))["status"] == "healthy"
