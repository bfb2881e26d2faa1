"""Random and crafted request lines, headers and parameters, and requests derived from the OpenAPI document."""

import json
import re
from urllib.parse import quote_from_bytes
from uuid import uuid4

import pytest
import schemathesis
import schemathesis.openapi
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.parameters.parse import names
from app.api.parameters.tasks import DetectParameters
from tests.fakes.models import scene
from tests.faults.exchange import NO_ANSWER, Answer, Case, ask, ask_all, encode
from tests.faults.serving import Gateway, unharmed

_IMAGE = scene("JPEG")
_BATCH = 25
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NUMBERS = ["NaN", "-inf", "1e400", "-0", "0x10", "1_000", "٣", "9" * 400, "", " 1", "true", "null", "[1]"]
_TEXTS = ["../null", "null\0", "%2e%2e", "'; --", "${jndi:x}", "{{7*7}}", "\r\nX-Canary: 1", "\ud7ff", "a" * 5_000]
_values = st.one_of(st.sampled_from([*_NUMBERS, *_TEXTS]), st.text(max_size=20), st.floats().map(str), st.integers().map(str)).map(
    lambda text: text.encode("utf-8", "replace")
)
_names = st.one_of(
    st.sampled_from([*(set(names(DetectParameters)) - {"timeout_ms"}), "Model", "image", "__class__"]).map(str.encode),
    st.binary(max_size=10),
)
_queries = st.lists(st.tuples(_names, st.one_of(_values, st.binary(max_size=20))), max_size=5).map(
    lambda pairs: "&".join(f"{quote_from_bytes(name)}={quote_from_bytes(value)}" for name, value in pairs)
)
_KNOWN_HEADERS = """X-Request-ID Content-Type Accept Cookie Range Authorization X-API-Key Accept-Encoding X-Forwarded-For
    X-Forwarded-Host Forwarded Content-Encoding Upgrade TE If-Match Origin"""
_header_names = st.one_of(
    st.sampled_from(_KNOWN_HEADERS.split()), st.text("abcxyzABC-_.!", min_size=1, max_size=20).map(lambda text: f"X{text}")
)
_header_values = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"image/jpeg", b"a" * 8_000, b"multipart/form-data; boundary=" + b"x"])
)
_headers = st.lists(st.tuples(_header_names, _header_values), max_size=6).map(
    lambda pairs: b"".join(name.encode() + b": " + re.sub(rb"[\r\n\0]", b"", value) + b"\r\n" for name, value in pairs)
)
_METHODS = [b"POST", b"GET", b"PUT", b"TRACE", b"OPTIONS", b"CONNECT", b"HEAD", b"PRI", b"post", b"X" * 300]
_TARGETS = [b"/detect", b"*", b"http://x/detect", b"//detect", b"/../detect", b"/predict/"]
_lines = st.one_of(
    st.binary(min_size=1, max_size=60).map(lambda line: line + b"\r\n\r\n"),
    st.tuples(
        st.sampled_from(_METHODS),
        st.one_of(st.sampled_from(_TARGETS), st.binary(max_size=30)),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]),
    ).map(lambda parts: b" ".join(parts) + b"\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"),
)
_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
_fuzz = hypothesis_settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def _check(answer: Answer) -> None:
    """Demand an answer that is no failure and, if it is an error, explains itself."""
    assert answer.status < 500
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        problem = json.loads(answer.body)
        assert problem["status"] == answer.status
        assert problem["request_id"] == answer.headers["x-request-id"]
    assert "x-canary" not in answer.headers


@_fuzz
@given(queries=st.lists(_queries, min_size=_BATCH, max_size=_BATCH))
async def test_any_query(gateway: Gateway, queries: list[str]) -> None:
    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, [Case(query, encode(_IMAGE, f"/detect?{query}")) for query in queries], clients=2)

    for _, answer in answers:
        _check(answer)
        assert answer.status in {200, 400, 404}


@_fuzz
@given(headers=st.lists(_headers, min_size=_BATCH, max_size=_BATCH))
async def test_any_headers(gateway: Gateway, headers: list[bytes]) -> None:
    """The request id of the answer is always well formed."""
    end = b"Content-Length: %d\r\n\r\n" % len(_IMAGE) + _IMAGE
    cases = [Case(repr(lines), b"POST /detect HTTP/1.1\r\nHost: x\r\n" + lines + end) for lines in headers]

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, cases, clients=2)

    for _, answer in answers:
        _check(answer)
        assert answer.status in {200, 400, 406, 415, 431, NO_ANSWER}
        assert "x-request-id" not in answer.headers or _REQUEST_ID.fullmatch(answer.headers["x-request-id"])


@_fuzz
@given(lines=st.lists(_lines, min_size=_BATCH, max_size=_BATCH))
async def test_any_request_line(gateway: Gateway, lines: list[bytes]) -> None:
    with unharmed(gateway, growth_mb=50):
        for line in lines:
            _check(await ask(gateway.url, line))
        assert (await ask(gateway.url, encode(_IMAGE))).status == 200


@pytest.mark.system
async def test_flood_of_headers_is_rejected(gateway: Gateway) -> None:
    for lines in (b"".join(b"X-%d: y\r\n" % n for n in range(10_000)), b"X: " + b"y" * 2**20 + b"\r\n"):
        with unharmed(gateway):
            answer = await ask(gateway.url, b"GET /livez HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        assert answer.status in {400, 431, NO_ANSWER}


@pytest.mark.system
@pytest.mark.parametrize(
    "model", ["..%2f..%2fetc%2fpasswd", "null%00", "%0d%0aX-Canary:%201", "a" * 500, "%ff%fe", "..", "%2e%2e", "null%20", "*"]
)
async def test_name_that_no_model_has_is_not_found_without_asking_triton(gateway: Gateway, model: str) -> None:
    request_id = uuid4().hex
    answer = await ask(gateway.url, encode(_IMAGE, f"/predict/{model}", X_Request_ID=request_id))

    _check(answer)
    assert answer.status == 404
    assert b"passwd" not in answer.body
    assert "infer;" not in answer.headers["server-timing"]
    assert gateway.wait_for_line(request_id)["status"] == 404


@pytest.mark.system
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_from_the_openapi_document_are_answered_as_it_says(gateway: Gateway, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{gateway.url}/docs/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]

    @hypothesis_settings(_fuzz, max_examples=100)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations]))
        for values in (case.query, case.body):
            if isinstance(values, dict) and isinstance(values.get("timeout_ms"), int):
                values["timeout_ms"] = 20_000  # a short deadline is answered with 504, as it should be
        response = case.call()
        if b"a vector that is zero" not in response.content:  # what the small model of these tests makes of a black picture
            case.validate_response(response, checks=_CHECKS)

    with unharmed(gateway):
        check()
