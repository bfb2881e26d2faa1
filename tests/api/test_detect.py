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
from tests.support import SCENE, captured_log, eventually, finds, free_port, in_cycles, json, sample_image, started, until_ready

CAT = sample_image("chelsea.jpg")
JPEG = {"Content-Type": "image/jpeg"}
BASE64 = base64.b64encode(CAT).decode()

FORMS: list[dict[str, Any]] = [{"files": {"image": ("cat.jpg", CAT)}}, {"json": {"image": BASE64}}]
BOTH_FORMS = pytest.mark.parametrize("form", FORMS, ids=["multipart", "json"])

Gateway = tuple[FakeTriton, httpx.AsyncClient]


def corners(detection: dict[str, Any]) -> tuple[float, ...]:
    return tuple(detection[key] for key in ("x1", "y1", "x2", "y2"))


@pytest.fixture(scope="module")
async def cat(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = json(await client.post("/detect", content=CAT, headers=JPEG))
    return answer


def found(answer: dict[str, Any]) -> list[Any]:
    """Return what does not depend on how the image was sent."""
    return [answer["detections"], answer["image"], answer["model"]]


def test_the_response_is_complete(cat: dict[str, Any]) -> None:
    (detection,) = cat["detections"]
    assert list(detection) == ["x1", "y1", "x2", "y2", "confidence", "class", "class_id", "class_name"]
    assert detection["class_name"] == "cat"
    assert detection["class"] == detection["class_id"] == 15
    assert detection["confidence"] > 0.8
    assert all(0 <= value <= 1 for value in corners(detection))
    assert cat["num_detections"] == 1
    assert cat["status"] == "success"
    assert cat["image"] == {"width": 451, "height": 300}
    assert cat["model"] == {"name": "yolo11n", "version": "1", "backend": "triton", "device": "cpu"}
    assert cat["total_time_ms"] > 0
    assert cat["request_id"]


@pytest.mark.parametrize(
    "kind", ["image/jpeg", "image/png", "application/octet-stream", "IMAGE/JPEG; x=y", "application/x-www-form-urlencoded", ""]
)
async def test_a_raw_body_is_read_whatever_image_it_is_declared_to_be(
    client: httpx.AsyncClient, cat: dict[str, Any], kind: str
) -> None:
    assert found(json(await client.post("/detect", content=CAT, headers={"Content-Type": kind}))) == found(cat)


@pytest.mark.parametrize("kind", ["image/jpeg", "application/json", "application/x-www-form-urlencoded"])
async def test_a_compressed_body_is_read(client: httpx.AsyncClient, cat: dict[str, Any], kind: str) -> None:
    bodies = {"image/jpeg": CAT, "application/json": msgspec.json.encode({"image": CAT})}
    data = gzip.compress(bodies.get(kind, b"image=" + quote_plus(BASE64).encode()))
    headers = {"Content-Type": kind, "Content-Encoding": "gzip"}

    assert found(json(await client.post("/detect", content=data, headers=headers))) == found(cat)


@pytest.mark.parametrize(
    ("query", "data", "headers", "status", "code"),
    [
        ("", b"", JPEG, 400, "malformed_request"),
        ("", b"{}", {"Content-Type": "application/json"}, 400, "malformed_request"),
        ("", b"--x", {"Content-Type": "multipart/form-data"}, 400, "malformed_request"),
        ("?confidence=2", CAT, JPEG, 400, "invalid_parameter"),
        ("?confidence=nan", CAT, JPEG, 400, "invalid_parameter"),
        ("?confidence=0.1&confidence=0.2", CAT, JPEG, 400, "invalid_parameter"),
        ("?classes=unicorn", CAT, JPEG, 400, "invalid_parameter"),
        ("?treshold=1", CAT, JPEG, 400, "invalid_parameter"),
        ("?model=nobody", CAT, JPEG, 404, "unknown_model"),
        ("?model=..%2F..%00", CAT, JPEG, 404, "unknown_model"),
        ("", CAT, {"Content-Type": "text/html"}, 415, "unsupported_media_type"),
        ("", CAT, {"Content-Encoding": "br"}, 415, "unsupported_media_type"),
        ("", CAT, {"Content-Encoding": "gzip"}, 400, "malformed_request"),
        ("", gzip.compress(bytes(60 << 20)), {"Content-Encoding": "gzip"}, 413, "body_too_large"),
        ("", b"%PDF-1.7", JPEG, 415, "unsupported_format"),
        ("", CAT[:20_000], JPEG, 422, "invalid_image"),
    ],
)
async def test_an_invalid_request_is_a_problem_with_its_own_code(  # noqa: PLR0913, PLR0917 - a table
    client: httpx.AsyncClient, query: str, data: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    response = await client.post(f"/detect{query}", content=data, headers=headers)

    problem = json(response, status)
    assert response.headers["content-type"].startswith("application/problem+json")
    assert problem["code"] == code
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert set(problem) == {"type", "title", "status", "detail", "code", "request_id"}


async def test_a_deadline_that_passes_is_a_504_and_triton_survives(settings: Settings, client: httpx.AsyncClient) -> None:
    """The RPC goes on, because cancelling it can crash Triton."""
    async with started(create_app(msgspec.structs.replace(settings, timeout_seconds=0.015))) as hasty:
        codes = [(await hasty.post("/detect", content=CAT)).json()["code"] for _ in range(5)]

    assert codes[0] == "deadline_passed"
    assert set(codes) <= {"deadline_passed", "gateway_full", "circuit_open"}
    await until_ready(client)
    assert json(await client.post("/detect", content=CAT))["num_detections"] == 1


@pytest.mark.parametrize("kind", ["multipart", "json", "query"])
async def test_the_caller_may_set_the_deadline(gateway: Gateway, kind: str) -> None:
    fake, client = gateway

    async def ask(timeout_ms: int) -> httpx.Response:
        if kind == "multipart":
            return await client.post("/detect", files={"image": SCENE}, data={"timeout_ms": str(timeout_ms)})
        if kind == "json":
            return await client.post("/detect", json={"image": base64.b64encode(SCENE).decode(), "timeout_ms": timeout_ms})
        return await client.post("/detect", params={"timeout_ms": timeout_ms}, content=SCENE)

    await ask(20_000)
    fake.may_answer.clear()
    problem = json(await ask(100), 504)
    fake.may_answer.set()

    assert problem["code"] == "deadline_passed"
    assert 10_000_000 < fake.requests[0].parameters["timeout"].int64_param <= 20_000_000
    assert all(request.parameters["timeout"].int64_param <= 100_000 for request in fake.requests[1:])


async def test_a_deadline_that_is_not_possible_is_rejected(gateway: Gateway) -> None:
    fake, client = gateway
    for answer in (
        await client.post("/detect", params={"timeout_ms": "20001"}, content=SCENE),
        await client.post("/detect", files={"image": ("scene.bmp", SCENE)}, data={"timeout_ms": "20001"}),
    ):
        problem = json(answer, 400)
        assert problem["code"] == "invalid_parameter"
        assert problem["detail"].startswith("timeout_ms: the maximum is 20000")
    assert fake.requests == []


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/detect", "tiny"), ("/predict/other", "other"), ("/v1/predict/other", "other"), ("/detect?model_name=other", "other")],
)
async def test_the_model_that_is_named_is_asked(gateway: Gateway, path: str, asked: str) -> None:
    fake, client = gateway
    await client.post(path, content=SCENE)

    assert [request.model_name for request in fake.requests] == [asked]


@BOTH_FORMS
async def test_parameters_of_query_and_form_are_combined(gateway: Gateway, form: dict[str, Any]) -> None:
    fake, client = gateway
    fake.answer = infer_response(output0=np.array([[0, 8, 32, 24, 0.5, 7], [0, 8, 16, 24, 0.75, 8]], np.float32))

    def with_parameter(name: str, value: str) -> dict[str, Any]:
        return {"json": {**form["json"], name: value}} if "json" in form else {**form, "data": {name: value}}

    (detection,) = json(await client.post("/detect?confidence=0.6", **with_parameter("boxes", "coco")))["detections"]
    twice = await client.post("/detect?boxes=coco", **with_parameter("boxes", "coco"))
    two_models = await client.post("/predict/other", **with_parameter("model", "other"))

    assert detection["class_id"] == 8
    assert "bbox" in detection
    assert json(twice, 400)["detail"] == "boxes is given more than once"
    assert json(two_models, 400)["detail"] == "model is given more than once"
    assert len(fake.requests) == 1


async def test_the_log_line_of_a_detection_says_what_was_done(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = gateway
    fake.answer = infer_response(output0=np.array([[0, 8, 32, 24, 0.5, 7], [0, 0, 0, 0, 0, 0]], np.float32))
    log = captured_log(monkeypatch, middleware)
    response = await client.post("/detect", files={"image": ("scene.bmp", SCENE)})

    (line,) = log
    fields = line.kwargs
    assert json(response)["num_detections"] == 1
    assert (fields["status"], fields["route"], fields["model"]) == (200, "/detect", "tiny")
    assert (fields["image_bytes"], fields["detections"]) == (len(SCENE), 1)
    assert fields["request_bytes"] == int(response.request.headers["content-length"]) > len(SCENE)
    assert fields["response_bytes"] == len(response.content)
    assert list(fields["stages"]) == ["read", "model", "queue", "decode", "batch", "infer", "post"]
    assert sum(fields["stages"].values()) <= fields["duration_ms"] + 0.06  # they are rounded


async def test_the_log_does_not_repeat_a_name_that_is_no_model(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be anything that a caller has put into the query, and Triton's message repeats it."""
    fake, client = gateway
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'canary' is not found"
    log = captured_log(monkeypatch, middleware)
    json(await client.post("/detect?model=canary", content=SCENE), 404)
    json(await client.post("/detect", files={"image": SCENE}, data={"model": "canary"}), 404)

    assert [line.kwargs["code"] for line in log] == ["unknown_model"] * 2
    assert "canary" not in repr(log)


async def test_triton_gets_the_trace_of_the_caller(gateway: Gateway) -> None:
    fake, client = gateway
    fake.metadata.clear()
    trace = "0af7651916cd43dd8448eb211c80319c"
    traced = await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    await client.post("/detect", content=SCENE)
    for parent_and_flags in ("0000000000000000-01", "b7ad6b7169203331-00"):
        await client.post("/detect", content=SCENE, headers={"traceparent": f"00-{trace}-{parent_and_flags}"})
    twice = [("traceparent", f"00-{trace}-b7ad6b7169203331-01")] * 2
    assert "traceparent" not in (await client.post("/detect", content=SCENE, headers=twice)).headers

    assert traced.headers["traceparent"].split("-")[1] == trace
    assert [metadata.get("traceparent") for metadata in fake.metadata] == [traced.headers["traceparent"]] + [None] * 4


async def test_a_header_of_a_part_is_not_in_the_log(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = gateway
    log = captured_log(monkeypatch, middleware)
    disposition = b'Content-Disposition: form-data; name="image"; filename="canary-\xff.jpg"\r\ncanary'
    json(
        await client.post(
            "/detect",
            content=b"--b\r\n" + disposition + b"\r\n\r\n" + SCENE + b"\r\n--b--\r\n",
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        ),
        400,
    )

    (line,) = log
    assert line.kwargs["code"] == "malformed_request"
    assert "canary" not in repr(line)


@pytest.mark.parametrize("sent", [*FORMS, {"content": CAT, "headers": JPEG}], ids=["multipart", "json", "raw"])
async def test_only_a_form_is_parsed_in_a_thread(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sent: dict[str, Any]) -> None:
    """Base64 of fifty megabytes would keep the event loop from all other requests."""
    threads: list[threading.Thread] = []
    parse = body.parse_body

    def noted(*arguments: Any) -> Any:  # noqa: ANN401
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(body, "parse_body", noted)
    await gateway[1].post("/detect", **sent)

    assert [thread is not threading.main_thread() for thread in threads] == ["content" not in sent]


@BOTH_FORMS
async def test_a_form_that_waits_for_a_busy_pool_has_a_deadline(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    gate = Gate()
    parsed: list[object] = []
    parse = body.parse_body

    def noted(*arguments: Any) -> Any:  # noqa: ANN401
        if body.needs_parsing(arguments[1]):  # unlike the image that keeps the pool busy
            parsed.append(arguments)
        return parse(*arguments)

    monkeypatch.setattr(body, "parse_body", noted)
    fake = FakeTriton()
    async with serving(fake), started(create_app(settings_for(fake.url, decode_threads=1, timeout_seconds=0.2))) as client:
        fake.requests.clear()
        gate.block(monkeypatch, preprocess, "fill_input")
        blocking = asyncio.ensure_future(client.post("/detect?timeout_ms=20000", content=CAT))
        await eventually(gate.reached.is_set)
        assert json(await client.post("/detect", **form), 504)["code"] == "deadline_passed"
        gate.opened.set()
        assert (await blocking).status_code == 502

    assert parsed == []
    assert len(fake.requests) == 1


async def test_without_triton_an_image_is_released_at_once(settings: Settings) -> None:
    nowhere = msgspec.structs.replace(settings, triton_endpoints=f"127.0.0.1:{free_port()}")
    async with started(create_app(nowhere)) as client:
        with in_cycles(RequestContext) as kept:
            for _ in range(3):
                assert (await client.post("/detect", content=SCENE)).status_code == 503

    assert not kept


@pytest.mark.parametrize(("model", "code"), [("six_columns", "invalid_image"), ("absent", "unknown_model")])
@pytest.mark.usefixtures("triton")
async def test_a_rejected_image_is_released_at_once(settings: Settings, model: str, code: str) -> None:
    """No reference cycle keeps the body until the garbage collector runs."""
    async with started(create_app(settings)) as client:
        assert await finds(client)
        with in_cycles(RequestContext) as kept:
            for _ in range(3):  # the test's own client holds on to the last
                assert (await client.post(f"/predict/{model}", content=SCENE[:500])).json()["code"] == code

    assert not kept
