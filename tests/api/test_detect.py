"""POST /detect and /predict/{model}, mostly with the real model: what goes in, what comes out in which format, what is rejected."""

import asyncio
import base64
import gzip
from io import BytesIO
from typing import Any
from urllib.parse import quote_plus

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.api.admission import middleware
from app.api.answering.format import best
from app.api.answering.native import to_detections
from app.api.answering.responses import LargeResponse
from app.api.context import PAUSE_SECONDS, BodyLimits, RequestContext
from app.api.parameters.parse import Parameters, parse_parameters
from app.api.parameters.tasks import BatchParameters, DetectParameters
from app.errors import GatewayError, InvalidParameter
from app.imaging.drawing import colour_of
from app.main import create_app
from app.pipeline.results import Detections
from app.resilience.memory import MemoryBudget
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from tests.api.conftest import Gateway, in_virtual_time, now
from tests.fakes.triton import SPEC, infer_response
from tests.support import SCENE, captured_log, finds, in_cycles, json, receiving, sample_image, started

CAT = sample_image("chelsea.jpg")
JPEG = {"Content-Type": "image/jpeg"}
BASE64 = base64.b64encode(CAT).decode()


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
    plain = [(kind, CAT) for kind in ("image/png", "IMAGE/JPEG; x=y", "binary/octet-stream", form, "")]
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
        ("", b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n', JPEG, 415, "unsupported_format"),
        ("", CAT[:20_000], JPEG, 422, "invalid_image"),
    ):
        problem = json(await client.post(f"/detect{query}", content=data, headers=headers), status)
        assert (problem["code"], problem["status"]) == (code, status)


async def test_caller_may_set_the_deadline_up_to_a_maximum(gateway: Gateway) -> None:
    fake, client = gateway

    async def ask(timeout_ms: int) -> httpx.Response:
        return await client.post("/detect", files={"image": SCENE}, data={"timeout_ms": str(timeout_ms)})

    assert json(await ask(20_001), 400)["detail"].startswith("timeout_ms: the maximum is 20000")
    assert fake.requests == []
    await ask(20_000)
    fake.may_answer.clear()
    assert json(await ask(100), 504)["code"] == "deadline_passed"
    fake.may_answer.set()

    assert 10_000_000 < fake.requests[0].parameters["timeout"].int64_param <= 20_000_000
    assert all(request.parameters["timeout"].int64_param <= 100_000 for request in fake.requests[1:])


@pytest.mark.parametrize("kind", ["multipart", "json"])
async def test_parameters_of_path_query_and_form_are_combined(gateway: Gateway, kind: str) -> None:
    fake, client = gateway
    fake.answer = infer_response(output0=np.array([[0, 8, 32, 24, 0.5, 7], [0, 8, 16, 24, 0.75, 8]], np.float32))

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


async def test_log_repeats_neither_a_name_that_is_no_model_nor_a_header_of_a_part(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be anything that a caller has put there, and Triton's message repeats it."""
    fake, client = gateway
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'canary' is not found"
    log = captured_log(monkeypatch, middleware)
    json(await client.post("/detect?model=canary", content=SCENE), 404)
    json(await client.post("/detect", files={"image": SCENE}, data={"model": "canary"}), 404)
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="canary-\xff.jpg"\r\ncanary\r\n\r\n\r\n--b--\r\n'
    json(await client.post("/detect", content=part, headers={"Content-Type": "multipart/form-data; boundary=b"}), 400)

    assert [line.kwargs["code"] for line in log] == ["unknown_model", "unknown_model", "malformed_request"]
    assert "canary" not in repr(log)


@pytest.mark.usefixtures("served")
async def test_image_that_is_not_answered_is_released_at_once(settings: Settings) -> None:
    """No reference cycle keeps the body until the garbage collector runs."""
    async with started(create_app(settings)) as client:
        assert await finds(client)
        for path, status in (("/predict/six_columns", 422), ("/predict/absent", 404)):
            with in_cycles(RequestContext) as kept:
                for _ in range(3):  # the test's own client holds on to the last
                    assert (await client.post(path, content=SCENE[:500])).status_code == status
            assert not kept


def test_values_within_their_range_are_accepted_and_others_are_told_it() -> None:
    rows: list[tuple[str, dict[str, object], str, str]] = [
        ("confidence", {"0": 0.0, "1e-3": 0.001}, "-0.1 1.0001 nan 1e400 null 0,5", "a number from 0 to 1"),
        ("max_detections", {"1": 1, "300": 300, "5.0": 5}, "0 301 1.5 ten ٣", "a whole number from 1 to 300"),
        ("version", {"1": 1, str(2**63 - 1): 2**63 - 1}, f"0 {2**63} latest", "a whole number from 1"),
        ("agnostic", {"true": True, "1": True, "False": False, "0": False}, "yes 2", "true or false"),
        ("boxes", {"cxcywh": "cxcywh"}, "yolo Pixel", "one of 'coco', 'cxcywh', 'normalized', 'pixel'"),
        ("classes", {"null": "null"}, ", ,,,", "names or ids, separated by commas"),
    ]
    for name, valid, invalid, expected in rows:
        assert {text: getattr(parse_parameters([(name, text)], DetectParameters), name) for text in valid} == valid
        for value in [*invalid.split(), ""]:
            with pytest.raises(InvalidParameter) as caught:
                parse_parameters([(name, value)], DetectParameters)
            assert caught.value.detail.startswith(f"{name}: expected {expected}"), value


def test_name_that_is_not_valid_is_told() -> None:
    supported = ", ".join(DetectParameters.__struct_fields__)
    rows: list[tuple[type[Parameters], list[str], str]] = [
        (DetectParameters, ["x" * 10_000], f"unknown parameter '{'x' * 64}'; supported parameters: {supported}"),
        (BatchParameters, ["image"], "unknown parameter 'image'; the image belongs into the body; supported"),
        (DetectParameters, ["model_name", "boxes", "model"], "model is given more than once"),
        (DetectParameters, ["conf"], "unknown parameter 'conf'; did you mean 'confidence'? supported parameters: timeout_ms,"),
    ]
    for kind, names, detail in rows:
        with pytest.raises(InvalidParameter) as caught:
            parse_parameters([(name, "coco" if name == "boxes" else "0.5") for name in names], kind)
        assert caught.value.detail.startswith(detail)


@given(st.lists(st.tuples(st.one_of(st.sampled_from(DetectParameters.__struct_fields__), st.text()), st.text()), max_size=4))
def test_any_text_gives_parameters_or_a_gateway_error(pairs: list[tuple[str, str]]) -> None:
    try:
        parameters = parse_parameters(pairs, DetectParameters)
    except GatewayError:
        return

    assert 0 <= parameters.confidence <= 1
    assert 1 <= parameters.max_detections <= 300


PATH = "/predict/six_columns"


def test_type_with_the_highest_quality_is_chosen() -> None:
    """The most specific range counts; of several with equal quality, the first type that is available (RFC 9110, 12.5.1)."""
    browser = b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
    for accept, chosen in (
        (b"image/*", "image/jpeg"),
        (b"image/jpeg; q=0.5 ,image/png;q=0.6", "image/png"),
        (b"image/jpeg;q=0, image/*", "image/png"),
        (b"image/jpg, image/png;q=0.5", "image/jpeg"),
        (b"*/*;q=0.9, image/png;Q=1.000", "image/png"),
        (browser, "application/json"),
        (b"image/webp, text/html;q=0.5", None),
        (b"\xff\xfe", "application/json"),  # a header without a media type asks for nothing
        (b"text/html," * 50 + b"image/png", None),  # no program needs more than fifty types
    ):
        assert best(accept, ("application/json", "image/jpeg", "image/png")) == chosen, accept


def assert_framed(picture: bytes, image_format: str, detections: list[dict[str, Any]]) -> None:
    with Image.open(BytesIO(picture)) as image:
        assert image.format == image_format
        pixels = np.asarray(image)
    assert len(detections) == 2
    for detection in detections:
        x1, y1, x2, y2 = (round(detection[name]) for name in ("x1", "y1", "x2", "y2"))
        assert (np.abs(pixels[(y1 + y2) // 2, [x1, x2 - 1]] - np.array(colour_of(detection["class_id"]), int)) < 30).all()


async def test_picture_has_the_boxes_that_were_found(client: httpx.AsyncClient) -> None:
    expected = json(await client.post(PATH, params={"boxes": "pixel"}, content=SCENE))["detections"]
    for query, accept, image_format in (
        ("", "image/avif,image/webp,image/*,*/*;q=0.8", "JPEG"),
        ("?format=image", "image/png", "PNG"),
        ("?format=image", "application/json", "JPEG"),
    ):
        answer = await client.post(PATH + query, content=SCENE, headers={"Accept": accept})
        headers = {"content-type": f"image/{image_format.lower()}", "vary": "Accept", "content-length": str(len(answer.content))}
        assert {name: answer.headers[name] for name in headers} == headers
        assert " draw;dur=" in answer.headers["server-timing"]
        assert_framed(answer.content, image_format, expected)
    headers = {"Accept": "application/json, image/png;q=0.1"}
    answer = await client.post(f"{PATH}?format=image_and_json&boxes=pixel", content=SCENE, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert json(answer)["detections"] == expected
    assert_framed(base64.b64decode(json(answer)["visualization"], validate=True), "PNG", expected)


def test_all_units_describe_the_same_box() -> None:
    size = np.array([200, 100] * 2, np.float32)
    boxes = np.array([[20, 10, 60.5, 90], [0, 0, 200, 100]], np.float32)
    scores, ids = np.array([1.0005, 0.123456], np.float32), np.array([2, 3], np.int32)
    labelled = msgspec.structs.replace(SPEC, labels=("person", "car", "traffic light"))
    found = Detections(boxes, scores, ids, 200, 100, labelled, "7")
    sides = boxes[:, 2:] - boxes[:, :2]
    for unit, expected in (
        ("normalized", boxes / size),
        ("pixel", boxes),
        ("coco", np.hstack([boxes[:, :2], sides])),
        ("cxcywh", np.hstack([boxes[:, :2] + sides / 2, sides])),
    ):
        written = msgspec.to_builtins(to_detections(found, unit))  # type: ignore[arg-type]
        values = [one.get("bbox") or [one[name] for name in ("x1", "y1", "x2", "y2")] for one in written]
        np.testing.assert_allclose(values, expected, rtol=0, atol=0.5e-2 if unit != "normalized" else 0.5e-6)
        # A model may have more classes than labels.
        assert [(one["confidence"], one["class_name"]) for one in written] == [(1.0, "traffic light"), (0.1235, "3")]


LARGE = bytes(range(256)) * 4096


async def answered(memory: MemoryBudget, seconds: float, total: float) -> tuple[list[Any], RequestContext]:
    """Send a large response to a client that takes so long for each message; return the messages."""
    context = RequestContext("r1", "")
    context.body_limits = BodyLimits(1, total)
    messages: list[Any] = []

    async def take(message: Any) -> None:  # noqa: ANN401
        messages.append(message)
        assert memory.own_bytes == len(LARGE)
        await asyncio.sleep(seconds)

    scope: Any = {"state": {"request_context": context}}
    await LargeResponse(LARGE, "image/png", memory)(scope, receiving(), take)
    return messages, context


@in_virtual_time
async def test_memory_of_a_large_response_is_counted_until_the_client_has_it_or_is_left(table: WorkerTable) -> None:
    memory = MemoryBudget(table, "memory", 2 << 20)
    messages, context = await answered(memory, 0, 10)
    assert b"".join(message["body"] for message in messages[1:]) == LARGE
    assert not context.is_client_gone
    for seconds, total, left_after, pieces in ((12, 30, 12 + PAUSE_SECONDS, 1), (7, 8, 7 + 8, 2)):
        before = now()
        messages, context = await answered(memory, seconds, total)
        assert (now() - before, len(messages)) == (left_after, 1 + pieces)  # the first message has no body
        assert context.is_client_gone
    assert memory.own_bytes == 0
