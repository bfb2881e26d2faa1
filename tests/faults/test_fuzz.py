"""Random and crafted request lines, headers and parameters, requests from the OpenAPI document, and secrets in requests."""

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest
import schemathesis
import schemathesis.openapi
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.caller import keys
from app.api.parameters.parse import names
from app.api.parameters.tasks import DetectParameters
from app.triton.shared_memory import SHM
from bench.harness.triton import Triton
from tests.fakes.models import scene
from tests.faults.exchange import NO_ANSWER, Answer, Case, ask, ask_all, encode
from tests.faults.serving import Gateway, serving, unharmed
from tests.imaging.samples import NOISE
from tests.imaging.samples import encode as encode_image

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
_MODELS = b"..%2f..%2fetc%2fpasswd null%00 %0d%0aX-Canary:%201 %ff%fe .. %2e%2e null%20 *".split()
_TARGETS = b"/detect * http://x/detect //detect /../detect /predict/".split()
_TARGETS += [b"/predict/" + name for name in (*_MODELS, b"a" * 500)]
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
@given(queries=st.lists(_queries, min_size=_BATCH, max_size=_BATCH), headers=st.lists(_headers, min_size=_BATCH, max_size=_BATCH))
async def test_any_query_and_any_headers(gateway: Gateway, queries: list[str], headers: list[bytes]) -> None:
    """The request id of the answer is always well formed."""
    end = b"Content-Length: %d\r\n\r\n" % len(_IMAGE) + _IMAGE
    cases = [Case("", encode(_IMAGE, f"/detect?{query}")) for query in queries]
    cases += [Case("", b"POST /detect HTTP/1.1\r\nHost: x\r\n" + lines + end) for lines in headers]

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, cases, clients=2)

    for _, answer in answers:
        _check(answer)
        assert answer.status in {200, 400, 404, 406, 415, 431, NO_ANSWER}
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

    with unharmed(gateway, allowed={502}):  # of that model
        check()


_CANARY = "canary7f3a"
"""Begins every canary; what follows tells where it was sent."""
_VALUE = "value9c4e"
"""The same for the values of parameters."""
_FORM, _JSON = "multipart/form-data; boundary=x", "application/json"
_URL = f"https://host.example/{_VALUE}-path?token={_VALUE}-token"


def _with_canaries() -> bytes:
    exif = Image.Exif()
    exif[270] = f"{_CANARY}-exif"
    return encode_image(NOISE, "JPEG", exif=exif, comment=f"{_CANARY}-comment".encode())


def _form(image: bytes, field: str = "confidence", value: str = "0.5") -> bytes:
    fields = f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
    file = f'--x\r\nContent-Disposition: form-data; name="image"; filename="{_CANARY}-filename.jpg"\r\n\r\n'
    return (fields + file).encode() + image + b"\r\n--x--\r\n"


def _requests(credential: str) -> Iterator[tuple[int, bytes]]:
    """Make requests with canaries, and the status that each must be answered with."""
    image, allowed = _with_canaries(), {"X_API_Key": credential}
    headers = {name: f"{_CANARY}-{name}" for name in ("Cookie", "User_Agent", "Referer", "X_Forwarded_For", "X_Token", "Accept")}
    known_id = credential.partition(".")[0]
    yield 200, encode(image, **allowed, **headers)
    yield 200, encode(image, Authorization=f"Bearer {credential}", Content_Type=f"image/jpeg; name={_CANARY}-type")
    yield 200, encode(_form(image), **allowed, Content_Type=_FORM)
    yield 200, encode(image, **allowed, X_Request_ID=f"{_CANARY} is no request id")
    for wrong in (f"{_CANARY}-key.{_CANARY}-secret", f"{known_id}.{_CANARY}-secret", f"{_CANARY}-without-a-dot"):
        yield 401, encode(image, X_API_Key=wrong)
        yield 401, encode(image, Authorization=f"Bearer {wrong}")
        yield 401, encode(image, Authorization=f"Basic {wrong}")
    yield 401, encode(image, f"/detect?api_key={_CANARY}-query")
    yield 401, encode(image, **allowed, Authorization=f"Bearer {_CANARY}-second")
    yield 403, encode(b"", "/health", "GET", **allowed)
    for name in ("confidence", "max_detections", "timeout_ms", "boxes", "classes"):
        yield 400, encode(image, f"/detect?{name}={_VALUE}-query", **allowed)
        yield 400, encode(_form(image, name, f"{_VALUE}-form"), **allowed, Content_Type=_FORM)
        text = json.dumps({"image": base64.b64encode(image).decode(), name: f"{_VALUE}-json"})
        yield 400, encode(text.encode(), **allowed, Content_Type=_JSON)
    for text in (json.dumps({"image": _URL}), json.dumps({f"image {_VALUE}": ""}), f"img={_URL}", f"{_VALUE}=1&boxes=coco"):
        yield 400, encode(text.encode(), **allowed, Content_Type="application/x-www-form-urlencoded")
    for field in (f"{_VALUE}-field", "confidence"):
        yield 400, encode(_form(image, field).replace(b'"image"', f'"{_VALUE}-name"'.encode()), **allowed, Content_Type=_FORM)
    yield 400, encode(_form(image)[:-20], **allowed, Content_Type=_FORM)
    yield 200, encode(_form(image).replace(b"-filename", b"-not-utf-8-\xff"), **allowed, Content_Type=_FORM)
    yield 400, encode(b'{"image": "' + base64.b64encode(image) + b"!", **allowed, Content_Type=_JSON)
    yield 422, encode(image[: len(image) // 2], **allowed)
    yield 415, encode(f"{_CANARY}-text".encode() * 20, **allowed)
    yield 413, encode(image + bytes(2**20), **allowed)


def _places(text: bytes, *secrets: str) -> list[str]:
    """Return where secrets occur in a text: plain, in hex or in base64."""
    forms = [form for secret in secrets for form in (secret.encode(), secret.encode().hex().encode())]
    forms += [base64.b64encode(bytes(skip) + secret.encode())[4:12] for secret in secrets for skip in range(3)]
    found = [match.start() for form in forms for match in re.finditer(re.escape(form), text)]
    return [repr(text[max(0, at - 80) : at + 80]) for at in found]


@pytest.mark.system
async def test_no_secret_comes_out(null_triton: Triton, tmp_path: Path) -> None:
    """Nor does an answer contain a name of a shared memory region, or anything of a programming language."""
    credential, table = keys.create("camera-1")
    secret = credential.partition(".")[2]
    (file := tmp_path / "keys.toml").write_text(table, encoding="utf-8")
    answers: list[Answer] = []
    with serving(null_triton, tmp_path, settings={"api_keys_file": file, "log_level": "debug", "max_file_size_mb": 1}) as gateway:
        for status, request in _requests(credential):
            answers.append(await ask(gateway.url, request))
            assert answers[-1].status == status, (request[:200], answers[-1].body)
        visible = [str((process.cmdline(), process.environ())) for process in (gateway.process, *gateway.workers())]
    log = gateway.log.read_bytes()
    log += b"".join(path.read_bytes() for path in Path(null_triton.settings.triton_home).glob("*.log"))  # noqa: ASYNC240
    said = b"".join(repr(answer).encode() for answer in answers)

    assert _places(log, secret, _CANARY, _VALUE) == []
    assert _places(said, secret, _CANARY) == []
    words = ("Traceback", ".py", "/tmp", "/home", str(SHM), "nereid-", "PIL", "msgspec")  # noqa: S108
    assert [word for word in words if word.encode() in said] == []
    assert b'"status":422' in log
    assert secret not in str([visible, os.environ])
