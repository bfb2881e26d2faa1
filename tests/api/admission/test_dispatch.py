"""While the gateway is full, requests are rejected before Litestar is called, and before their body is received."""

import asyncio
import hashlib
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
import pytest

from app.api.admission import middleware
from app.api.application import Application
from app.errors import CircuitOpen
from app.main import create_app
from app.resilience.model_queue import ModelQueue
from tests.api.conftest import post_unread, settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, Reply, call, calling, captured_log, eventually, json, lifespan_of, receiving, staying

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing


@pytest.mark.parametrize(
    ("full", "rejected", "accepted"),
    [
        (
            "tiny",
            ["/detect", "/predict/tiny", "/v1/detect?model=tiny", "//v1//predict/tiny/", "/detect/batch"],
            ["/predict/other", "/detect?model=other", "/classify"],
        ),
        (
            "efficientnet_lite0",
            ["/classify", "/v1/classify", "/classify/", "/detect?model=efficientnet_lite0", "/predict/efficientnet_lite0"],
            ["/detect", "/classify?model=tiny"],
        ),
        (
            "other",
            ["/predict/other", "/detect?model=other", "/detect?confidence=0.5&model_name=other", "/v1/detect/batch?model=other"],
            ["/detect", "/predict/tiny", "/detect?model_name=tiny", "/detect?classes=model"],
        ),
    ],
)
async def test_a_request_for_a_full_model_is_rejected_before_the_body_is_read(
    filling: tuple[FakeTriton, Application], full: str, rejected: list[str], accepted: list[str]
) -> None:
    fake, app = filling
    body = {"type": "http.request", "body": SCENE, "more_body": False}
    first = asyncio.create_task(call(app, staying(body), f"/predict/{full}", {"Content-Length": str(len(SCENE))}))
    await eventually(lambda: len(fake.requests) == 1)
    for path in rejected:
        reply = await post_unread(app, path, {"Content-Type": "image/bmp", "Content-Length": "100"})
        assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (429, "gateway_full", "1")
    for path in accepted:
        broken = {"type": "http.request", "body": b"no image", "more_body": False}
        reply = await call(app, receiving(broken), path, {"Content-Type": "image/bmp"})
        assert reply.problem["code"] in {"unsupported_format", "invalid_parameter", "wrong_task"}
    fake.may_answer.set()

    assert (await first).status == 502


async def test_a_model_that_triton_no_longer_answers_is_503_before_the_body_is_read(
    filling: tuple[FakeTriton, Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, app = filling
    monkeypatch.setattr(ModelQueue, "full", lambda *_: CircuitOpen("Triton has stopped to answer"))
    first = asyncio.create_task(call(app, staying({"type": "http.request", "body": SCENE, "more_body": False}), "/detect"))
    await eventually(lambda: len(fake.requests) == 1)
    reply = await post_unread(app, "/detect", {"Content-Length": "100"})
    fake.may_answer.set()
    await first

    assert (reply.status, reply.problem["code"]) == (503, "circuit_open")


async def test_a_model_in_a_form_is_rejected_once_it_is_known(filling: tuple[FakeTriton, Application]) -> None:
    fake, app = filling
    first = asyncio.create_task(call(app, staying({"type": "http.request", "body": SCENE, "more_body": False}), "/predict/other"))
    await eventually(lambda: len(fake.requests) == 1)
    async with calling(app) as client:
        answer = await client.post("/detect", files={"image": SCENE}, data={"model": "other"})
    fake.may_answer.set()

    assert json(answer, 429)["code"] == "gateway_full"
    await first


async def test_a_key_with_a_share_uses_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(
            f'[{id_}]\nsha256 = ["{hashlib.sha256(SECRET.encode()).hexdigest()}"]\nscopes = ["{scope}"]\nshare = {share}\n'
            for id_, scope, share in (("camera", "detect", 0.01), ("other", "detect", 0.0), ("monitor", "health", 0.01))
        )
    )
    fake = FakeTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=str(path)))):
        fake.requests.clear()
        fake.may_answer.clear()
        body = {"type": "http.request", "body": SCENE, "more_body": False}
        keys = {id_: {"X-API-Key": f"{id_}.{SECRET}", "Content-Length": "1"} for id_ in ("camera", "other", "monitor")}
        running = [asyncio.create_task(call(app, staying(body), "/predict/other", keys["camera"]))]
        await eventually(lambda: len(fake.requests) == 1)
        log = captured_log(monkeypatch, middleware)
        rejected = await post_unread(app, "/predict/other", keys["camera"])
        again = await post_unread(app, "/predict/other/", keys["camera"])
        nobody = await post_unread(app, "/predict/other", {"Content-Length": "1"})
        monitor = await post_unread(app, "/predict/other", keys["monitor"])
        running.append(asyncio.create_task(call(app, staying(body), "/predict/other", keys["other"])))
        await eventually(lambda: len(fake.requests) == 2)
        fake.may_answer.set()

        assert [reply.status for reply in (rejected, again, nobody, monitor)] == [429, 429, 401, 403]
        assert [(line.kwargs["status"], line.kwargs.get("key"), line.kwargs.get("model")) for line in log[:4]] == [
            (429, "camera", "other"),
            (429, "camera", "other"),
            (401, None, None),
            (403, "monitor", "other"),
        ]
        assert [reply.status for reply in await asyncio.gather(*running)] == [502, 502]


async def test_requests_without_an_image_pass_while_the_gateway_is_full(filling: tuple[FakeTriton, Application]) -> None:
    fake, app = filling
    body = {"type": "http.request", "body": SCENE, "more_body": False}
    first = asyncio.create_task(call(app, staying(body), "/detect"))
    await eventually(lambda: len(fake.requests) == 1)
    others = ("GET", "/livez"), ("GET", "/detect"), ("POST", "/livez"), ("POST", "/detections"), ("POST", "/predict/a/b")
    async with calling(app) as client:
        statuses = [(await client.request(method, path)).status_code for method, path in others]
    fake.may_answer.set()
    await first

    assert statuses == [200, 405, 405, 404, 404]


async def test_a_flood_with_one_key_leaves_room_to_another(filling: tuple[FakeTriton, Application], tmp_path: Path) -> None:
    """One key alone may have as many requests in progress as are allowed, and each other one up to half of an equal part."""
    fake, _ = filling
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
    file = write_keys(tmp_path, *((key, SECRET, "detect") for key in ("camera", "other")))
    async with lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=file, max_requests=10))):
        fake.query_refusal = None
        body = {"type": "http.request", "body": SCENE, "more_body": False}
        sent: dict[str, list[asyncio.Task[Reply]]] = {}
        for key, rejected in (("camera", 20), ("other", 28)):
            headers = {"X-API-Key": f"{key}.{SECRET}"}
            sent[key] = [asyncio.create_task(call(app, staying(body), "/predict/tiny", headers)) for _ in range(30)]
            await eventually(lambda key=key, rejected=rejected: sum(map(asyncio.Task.done, sent[key])) == rejected)  # type: ignore[misc]
        fake.may_answer.set()

        for key, admitted in (("camera", 10), ("other", 2)):
            answers = await asyncio.gather(*sent[key])
            assert Counter(answer.status for answer in answers) == {200: admitted, 429: 30 - admitted}
