"""What is decided before the body of a request is read: what it declares, and whether there is room for its model."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.datastructures import State

from app.api.admission import middleware
from app.api.admission.guards import guard_timing
from app.api.application import Application
from app.api.context import RequestContext
from app.api.dependencies import WorkerResources
from app.api.routes import ModelRoute
from app.errors import CircuitOpen
from app.main import create_app
from app.resilience.model_queue import ModelQueue
from app.telemetry import timing
from tests.api.conftest import post_unread, settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response
from tests.support import DEPLOYMENT, SCENE, Reply, call, calling, captured_log, chunk, eventually, json, lifespan_of, staying

LIMIT = 2**20
SUPPORTED = "image/*, application/octet-stream, multipart/form-data, application/json or application/x-www-form-urlencoded"
HTML, JPEG = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")

Filling = tuple[FakeTriton, Application]


async def test_request_is_rejected_before_the_body_is_read(shared_app: Application) -> None:
    """The detail says the limit in the unit of the setting, and does not repeat kilobytes of the request."""
    for path, headers, status, detail in (
        ("/detect", [JPEG, HTML], 415, f"'text/html' is not supported; send {SUPPORTED}"),
        ("/detect", [("Content-Type", "x" * 5000)], 415, f"'{'x' * 64}' is not supported; send {SUPPORTED}"),
        ("/detect/batch", [], 415, "a batch needs a Content-Type header; send multipart/form-data or application/json"),
        ("/detect", [JPEG, ("Content-Length", str(LIMIT + 1))], 413, "the limit is 1 MiB"),
        ("/detect", [("Content-Length", "")], 400, "Content-Length is not a number"),
        ("/detect?confidence=2", [("Content-Length", "100")], 400, "confidence: expected a number from 0 to 1"),
    ):
        reply = await post_unread(shared_app, path, headers)
        assert (reply.status, reply.problem["detail"]) == (status, detail)
    headers = [HTML, JPEG, ("Content-Length", str(LIMIT))]  # the last type counts
    reply = await call(shared_app, staying(chunk(b"x" * LIMIT)), "/detect", headers)
    assert (reply.status, reply.problem["code"]) == (415, "unsupported_format")


async def test_options_request_is_not_judged_by_its_body(shared_app: Application) -> None:
    headers = {"Content-Type": "text/html", "Content-Length": str(LIMIT * 1000)}
    async with calling(shared_app) as client:
        for path in ("/detect", "/v1/detect/batch/", "/predict/tiny"):
            response = await client.options(path, headers=headers)

            assert (response.status_code, response.headers["allow"]) == (204, "OPTIONS, POST")


async def test_stages_begin_when_the_request_has_passed_the_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before that is part of the total, but of no stage."""
    now = 10.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    context, worker = RequestContext("id", ""), WorkerResources(DEPLOYMENT._replace(slow_request_ms=7.0))
    app = Litestar(state=State({"worker": worker}, deep_copy=False))
    scope: Any = {"type": "http", "state": {"request_context": context}, "litestar_app": app}
    now = 10.5
    await guard_timing(ASGIConnection(scope), ModelRoute("/detect"))
    now = 10.75
    context.timing.lap("read")

    assert (context.slow_request_ms, context.timing.stages, context.timing.total) == (7.0, {"read": 250.0}, 750.0)


async def test_request_for_a_full_model_is_rejected_before_the_body_is_read(filling: Filling) -> None:
    fake, app = filling
    running: list[asyncio.Task[Reply]] = []
    for full, rejected, accepted in (
        ("tiny", ["/detect", "/v1/detect?model=tiny", "//v1//predict/tiny/", "/detect/batch"], ["/predict/other", "/classify"]),
        ("other", ["/predict/other", "/detect?confidence=0.5&model_name=other", "/v1/detect/batch?model=other"], ["/classify"]),
    ):
        running.append(asyncio.create_task(call(app, staying(chunk(SCENE)), f"/predict/{full}")))
        await eventually(lambda: len(fake.requests) == len(running))
        for path in rejected:
            reply = await post_unread(app, path, {"Content-Type": "image/bmp", "Content-Length": "100"})
            assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (429, "gateway_full", "1")
        for path in accepted:
            reply = await call(app, staying(chunk(b"no image")), path, {"Content-Type": "image/bmp"})
            assert reply.problem["code"] in {"unsupported_format", "wrong_task"}
    others = ("GET", "/livez"), ("GET", "/detect"), ("POST", "/livez"), ("POST", "/detections"), ("POST", "/predict/a/b")
    async with calling(app) as client:
        form = await client.post("/detect", files={"image": SCENE}, data={"model": "other"})  # whose model is not known before
        assert json(form, 429)["code"] == "gateway_full"
        assert [(await client.request(method, path)).status_code for method, path in others] == [200, 405, 405, 404, 404]
    fake.may_answer.set()

    assert [reply.status for reply in await asyncio.gather(*running)] == [502, 502]


async def test_model_that_triton_no_longer_answers_is_503_before_the_body_is_read(
    filling: Filling, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, app = filling
    monkeypatch.setattr(ModelQueue, "full", lambda *_: CircuitOpen("Triton has stopped to answer"))
    first = asyncio.create_task(call(app, staying(chunk(SCENE)), "/detect"))
    await eventually(lambda: len(fake.requests) == 1)
    reply = await post_unread(app, "/detect", {"Content-Length": "100"})
    fake.may_answer.set()
    await first

    assert (reply.status, reply.problem["code"]) == (503, "circuit_open")


async def test_flood_with_a_key_leaves_room_to_another(filling: Filling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key alone may have as many requests in progress as are allowed, and each other one up to half of an equal part."""
    fake, _ = filling
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
    file = write_keys(tmp_path, *((key, "secret", "detect") for key in ("camera", "other")))
    log = captured_log(monkeypatch, middleware)
    async with lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=file, max_requests=10))):
        fake.query_refusal = None
        sent: dict[str, list[asyncio.Task[Reply]]] = {}
        for key, rejected in (("camera", 20), ("other", 28)):
            headers = {"X-API-Key": f"{key}.secret"}
            sent[key] = [asyncio.create_task(call(app, staying(chunk(SCENE)), "/predict/tiny", headers)) for _ in range(30)]
            await eventually(lambda key=key, rejected=rejected: sum(map(asyncio.Task.done, sent[key])) == rejected)  # type: ignore[misc]
            assert {line.kwargs["status"]: (line.kwargs["key"], line.kwargs["model"]) for line in log} == {429: (key, "tiny")}
            log.clear()
        fake.may_answer.set()

        for key, admitted in (("camera", 10), ("other", 2)):
            answers = await asyncio.gather(*sent[key])
            assert Counter(answer.status for answer in answers) == {200: admitted, 429: 30 - admitted}
