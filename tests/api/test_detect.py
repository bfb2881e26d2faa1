"""POST /detect and /predict/{model} through HTTP, mostly with the real model: what goes in, what comes out, what is rejected."""

import asyncio
import base64
import gzip
import threading
from typing import Any
from urllib.parse import quote_plus

import grpc
import httpx
import msgspec
import numpy as np
import pytest

from app.api.admission import middleware
from app.api.context import RequestContext
from app.api.receiving import body
from app.main import create_app
from app.pipeline import preprocess
from app.settings.schema import Settings
from tests.api.conftest import settings_for
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.pipeline.gate import Gate
from tests.support import SCENE, captured_log, eventually, finds, free_port, in_cycles, json, sample_image, started

CAT = sample_image("chelsea.jpg")
JPEG = {"Content-Type": "image/jpeg"}
BASE64 = base64.b64encode(CAT).decode()
ONE_OBJECT = infer_response(output0=np.array([[0, 8, 32, 24, 0.5, 7], [0, 8, 16, 24, 0.75, 8]], np.float32))

Gateway = tuple[FakeTriton, httpx.AsyncClient]


async def test_response_is_complete_however_the_image_is_sent(client: httpx.AsyncClient) -> None:
    cat = json(await client.post("/detect", content=CAT, headers=JPEG))
    (detection,) = cat["detections"]
    assert list(detection) == ["x1", "y1", "x2", "y2", "confidence", "class", "class_id", "class_name"]
    assert (detection["class_name"], detection["class"], detection["class_id"]) == ("cat", 15, 15)
    assert detection["confidence"] > 0.8
    assert all(0 <= detection[corner] <= 1 for corner in ("x1", "y1", "x2", "y2"))
    assert (cat["num_detections"], cat["status"], cat["image"]) == (1, "success", {"width": 451, "height": 300})
    assert cat["model"] == {"name": "yolo11n", "version": "1", "backend": "triton", "device": "cpu"}
    assert cat["total_time_ms"] > 0
    assert cat["request_id"]

    json_, form = "application/json", "application/x-www-form-urlencoded"
    plain = [(kind, CAT) for kind in ("image/png", "IMAGE/JPEG; x=y", form, "")]
    coded = [("image/jpeg", CAT), (json_, msgspec.json.encode({"image": CAT})), (form, b"image=" + quote_plus(BASE64).encode())]
    for encoding, bodies in (("", plain), ("gzip", coded)):
        for kind, data in bodies:
            headers = {"Content-Type": kind, "Content-Encoding": encoding}
            answer = json(await client.post("/detect", content=gzip.compress(data) if encoding else data, headers=headers))
            assert [answer[part] for part in ("detections", "image", "model")] == [cat["detections"], cat["image"], cat["model"]]


async def test_invalid_request_is_a_problem_with_its_own_code(client: httpx.AsyncClient) -> None:
    for query, data, headers, status, code in (
        ("", b"", JPEG, 400, "malformed_request"),
        ("", b"{}", {"Content-Type": "application/json"}, 400, "malformed_request"),
        ("?classes=unicorn", CAT, JPEG, 400, "invalid_parameter"),
        ("?model=nobody", CAT, JPEG, 404, "unknown_model"),
        ("?model=..%2F..%00", CAT, JPEG, 404, "unknown_model"),
        ("", CAT, {"Content-Encoding": "br"}, 415, "unsupported_media_type"),
        ("", CAT, {"Content-Encoding": "gzip"}, 400, "malformed_request"),
        ("", gzip.compress(bytes(60 << 20)), {"Content-Encoding": "gzip"}, 413, "body_too_large"),
        ("", b"%PDF-1.7", JPEG, 415, "unsupported_format"),
        ("", CAT[:20_000], JPEG, 422, "invalid_image"),
    ):
        problem = json(await client.post(f"/detect{query}", content=data, headers=headers), status)
        assert (problem["code"], problem["status"]) == (code, status)


@pytest.mark.parametrize("kind", ["multipart", "json", "query"])
async def test_caller_may_set_the_deadline_up_to_a_maximum(gateway: Gateway, kind: str) -> None:
    fake, client = gateway

    async def ask(timeout_ms: int) -> httpx.Response:
        if kind == "multipart":
            return await client.post("/detect", files={"image": SCENE}, data={"timeout_ms": str(timeout_ms)})
        if kind == "json":
            return await client.post("/detect", json={"image": base64.b64encode(SCENE).decode(), "timeout_ms": timeout_ms})
        return await client.post("/detect", params={"timeout_ms": timeout_ms}, content=SCENE)

    assert json(await ask(20_001), 400)["detail"].startswith("timeout_ms: the maximum is 20000")
    assert fake.requests == []
    await ask(20_000)
    fake.may_answer.clear()
    problem = json(await ask(100), 504)
    fake.may_answer.set()

    assert problem["code"] == "deadline_passed"
    assert 10_000_000 < fake.requests[0].parameters["timeout"].int64_param <= 20_000_000
    assert all(request.parameters["timeout"].int64_param <= 100_000 for request in fake.requests[1:])


@pytest.mark.parametrize("kind", ["multipart", "json"])
async def test_parameters_of_path_query_and_form_are_combined(gateway: Gateway, kind: str) -> None:
    fake, client = gateway
    fake.answer = ONE_OBJECT

    def with_parameter(name: str, value: str) -> dict[str, Any]:
        return {"json": {"image": BASE64, name: value}} if kind == "json" else {"files": {"image": CAT}, "data": {name: value}}

    (detection,) = json(await client.post("/v1/predict/other?confidence=0.6", **with_parameter("boxes", "coco")))["detections"]
    twice = await client.post("/detect?boxes=coco", **with_parameter("boxes", "coco"))
    two_models = await client.post("/predict/other", **with_parameter("model", "other"))

    assert detection["class_id"] == 8
    assert "bbox" in detection
    assert json(twice, 400)["detail"] == "boxes is given more than once"
    assert json(two_models, 400)["detail"] == "model is given more than once"
    await client.post("/detect", **with_parameter("model_name", "another"))
    assert [request.model_name for request in fake.requests] == ["other", "another"]


async def test_parameters_of_the_query_hold_before_the_config_is_read(gateway: Gateway) -> None:
    fake, client = gateway
    fake.may_tell.clear()
    before = fake.config_reads
    for query in ("timeout_ms=soon", "version=0", "model=tiny"):
        assert json(await client.post(f"/predict/other?{query}", content=SCENE), 400)["code"] == "invalid_parameter"
    assert fake.config_reads == before
    problem = json(await client.post("/predict/other?timeout_ms=100", content=SCENE), 504)
    fake.may_tell.set()

    assert problem["code"] == "deadline_passed"
    assert fake.requests == []


async def test_only_the_version_of_the_query_is_asked_for(gateway: Gateway) -> None:
    """The newest version may no longer exist."""
    fake, client = gateway
    assert "top_k" in json(await client.post("/predict/other?version=1&top_k=1", content=SCENE), 400)["detail"]
    assert fake.requests == []
    await client.post("/predict/other?version=1", content=SCENE)

    assert fake.read_configs.count("other") == 1
    assert [(request.model_name, request.model_version) for request in fake.requests] == [("other", "1")]


async def test_log_line_of_a_detection_says_what_was_done(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = gateway
    fake.answer = ONE_OBJECT
    log = captured_log(monkeypatch, middleware)
    response = await client.post("/detect", files={"image": ("scene.bmp", SCENE)})

    fields = log[0].kwargs
    assert json(response)["num_detections"] == 2
    assert (fields["status"], fields["route"], fields["model"]) == (200, "/detect", "tiny")
    assert (fields["image_bytes"], fields["detections"]) == (len(SCENE), 2)
    assert fields["request_bytes"] == int(response.request.headers["content-length"]) > len(SCENE)
    assert fields["response_bytes"] == len(response.content)
    assert list(fields["stages"]) == ["read", "model", "queue", "decode", "batch", "infer", "post"]
    assert sum(fields["stages"].values()) <= fields["duration_ms"] + 0.06  # they are rounded


async def test_log_repeats_neither_a_name_that_is_no_model_nor_a_header_of_a_part(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be anything that a caller has put there, and Triton's message repeats it."""
    fake, client = gateway
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'canary' is not found"
    log = captured_log(monkeypatch, middleware)
    json(await client.post("/detect?model=canary", content=SCENE), 404)
    json(await client.post("/detect", files={"image": SCENE}, data={"model": "canary"}), 404)
    part = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="canary-\xff.jpg"\r\ncanary\r\n\r\n'
        + SCENE
        + b"\r\n--b--\r\n"
    )
    json(await client.post("/detect", content=part, headers={"Content-Type": "multipart/form-data; boundary=b"}), 400)

    assert [line.kwargs["code"] for line in log] == ["unknown_model", "unknown_model", "malformed_request"]
    assert "canary" not in repr(log)


async def test_triton_gets_the_trace_of_the_caller(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tracing here, the caller's own span goes on to Triton: no span is missing then."""
    fake, client = gateway
    fake.metadata.clear()
    log = captured_log(monkeypatch, middleware)
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    parent, state = ("traceparent", f"00-{trace}-{span}-01"), [("tracestate", "a=1"), ("tracestate", "b=2")]
    traced = await client.post("/detect", content=SCENE, headers=[parent, *state])
    unsampled = await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{trace}-{span}-00"})
    for headers in ([], [("traceparent", f"00-{trace}-{'0' * 16}-01")], [parent, parent]):
        assert "traceparent" not in (await client.post("/detect", content=SCENE, headers=headers)).headers

    assert (log[0].kwargs["trace_id"], log[0].kwargs["span_id"]) == (trace, span)
    assert (traced.headers["traceparent"], unsampled.headers["traceparent"]) == (parent[1], f"00-{trace}-{span}-00")
    assert [metadata.get("traceparent") for metadata in fake.metadata] == [parent[1]] + [None] * 4
    assert fake.metadata[0]["tracestate"] == "a=1,b=2"


async def test_form_is_parsed_in_a_thread_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base64 of fifty megabytes would keep the event loop from all other requests."""
    gate, fake = Gate(), FakeTriton()
    threads: list[tuple[bool, bool]] = []
    parse = body.parse_body

    def noted(*arguments: Any) -> Any:  # noqa: ANN401
        threads.append((body.needs_parsing(arguments[1]), threading.current_thread() is threading.main_thread()))
        return parse(*arguments)

    monkeypatch.setattr(body, "parse_body", noted)
    async with serving(fake), started(create_app(settings_for(fake.url, decode_threads=1, timeout_seconds=0.2))) as client:
        fake.requests.clear()
        forms: list[dict[str, Any]] = [{"files": {"image": ("cat.jpg", CAT)}}, {"json": {"image": BASE64}}]
        for form in forms:
            assert (await client.post("/detect?timeout_ms=20000", **form)).status_code == 502
        assert threads == [(True, False)] * 2
        gate.block(monkeypatch, preprocess, "fill_input")
        blocking = asyncio.ensure_future(client.post("/detect?timeout_ms=20000", content=CAT, headers=JPEG))
        await eventually(gate.reached.is_set)
        for form in forms:
            assert json(await client.post("/detect", **form), 504)["code"] == "deadline_passed"
        gate.opened.set()
        assert (await blocking).status_code == 502

    assert threads[2:] == [(False, True)]
    assert len(fake.requests) == 3


@pytest.mark.parametrize("path", ["/predict/six_columns", "/predict/absent", "nowhere"])
@pytest.mark.usefixtures("triton")
async def test_image_that_is_not_answered_is_released_at_once(settings: Settings, path: str) -> None:
    """No reference cycle keeps the body until the garbage collector runs."""
    is_there = path != "nowhere"
    own = settings if is_there else msgspec.structs.replace(settings, triton_endpoints=f"127.0.0.1:{free_port()}")
    async with started(create_app(own)) as client:
        assert not is_there or await finds(client)
        with in_cycles(RequestContext) as kept:
            for _ in range(3):  # the test's own client holds on to the last
                answer = await client.post(path if is_there else "/detect", content=SCENE[:500] if is_there else SCENE)
                assert answer.status_code == {"/predict/six_columns": 422, "/predict/absent": 404, "nowhere": 503}[path]

    assert not kept
