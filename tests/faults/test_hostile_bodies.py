"""Forms and JSON that are broken or crafted: the answer says so, and nothing breaks."""

import base64
import json
from random import Random

import pytest

from tests.fakes.models import scene
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, ask, ask_all, encode
from tests.faults.serving import Gateway, unharmed

pytestmark = pytest.mark.system

_SEED = 4604
_DAMAGED = 1_500
_IMAGE = scene("PNG")
_FORM = "multipart/form-data; boundary=limit"
_BASE64 = base64.b64encode(_IMAGE).decode()


def _part(disposition: str, content: bytes, *headers: str) -> bytes:
    head = "\r\n".join(["--limit", f"Content-Disposition: form-data{disposition}", *headers, "", ""])
    return head.encode("latin-1") + content + b"\r\n"


_FILE = _part('; name="image"; filename="scene.png"', _IMAGE, "Content-Type: image/png")
_END = b"--limit--\r\n"
_NESTED = _part('; name="image"', _FILE, "Content-Type: multipart/mixed; boundary=limit2")

ACCEPTED_FORMS = {
    "an image": _FILE + _END,
    "an image and a parameter": _part('; name="confidence"', b"0.5") + _FILE + _END,
    "the other name": _FILE.replace(b'"image"', b'"file"') + _END,
    "a file name that is a path": _FILE.replace(b"scene.png", b"../../../etc/passwd") + _END,
    "a file name with line breaks": _FILE.replace(b"scene.png", b"%0d%0aX-Canary: 1") + _END,
    "base64": _part('; name="image"', _BASE64.encode(), "Content-Transfer-Encoding: base64") + _END,
    "a preamble and an epilogue": b"preamble\r\n" + _FILE + _END + b"epilogue",
}
REJECTED_FORMS = {
    "nothing but the end": _END,
    "no end": _FILE,
    "cut in the image": _FILE[:-50],
    "two images": _FILE * 2 + _END,
    "both names": _FILE + _FILE.replace(b'"image"', b'"file"') + _END,
    "an empty image": _part('; name="image"', b"") + _END,
    "a part without a name": _part("", b"x") + _FILE + _END,
    "a part without a disposition": b"--limit\r\nX: y\r\n\r\nx\r\n" + _FILE + _END,
    "a parameter that is not UTF-8": _part('; name="confidence"', b"\xff\xfe") + _FILE + _END,
    "a parameter with a charset": _part('; name="confidence"', b"\xff", "Content-Type: text/plain; charset=zlib") + _FILE + _END,
    "a parameter twice": _part('; name="confidence"', b"0.5") * 2 + _FILE + _END,
    "an unknown parameter": _part('; name="__proto__"', b"1") + _FILE + _END,
    "1,500 parts": _part('; name="confidence"', b"0.5") * 1_500 + _FILE + _END,
    "a part with 100 headers": _part('; name="image"', _IMAGE, *(f"X-{n}: y" for n in range(100))) + _END,
    "a part with a header of 64 KiB": _part('; name="image"', _IMAGE, "X: " + "y" * 65_536) + _END,
    "no line breaks": _FILE.replace(b"\r\n", b" ") + _END,
    "another boundary": _FILE.replace(b"--limit", b"--other") + b"--other--\r\n",
}
REJECTED_TYPES = {
    "no boundary": "multipart/form-data",
    "an empty boundary": "multipart/form-data; boundary=",
    "a quote that does not end": 'multipart/form-data; boundary="limit',
    "a boundary of 8,000 characters": f"multipart/form-data; boundary={'x' * 8_000}",
    "a boundary that is not ASCII": "multipart/form-data; boundary=\xff\xfe",
}
REJECTED_JSON = {
    "nothing": b" ",
    "not UTF-8": b'{"image": "\xff"}',
    "UTF-16": '{"image": ""}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a list": b"[]",
    "a list 100,000 levels deep": b"[" * 100_000,
    "an object 100,000 levels deep": b'{"image":' * 100_000,
    "depth beside the image": json.dumps({"image": _BASE64}).encode()[:-1]
    + b', "classes": '
    + b"[" * 50_000
    + b"]" * 50_000
    + b"}",
    "no image": b"{}",
    "an image that is null": b'{"image": null}',
    "an image that is a number": b'{"image": 1e400}',
    "an image that is a list": b'{"image": [1, 2, 3]}',
    "an empty image": b'{"image": ""}',
    "no base64": b'{"image": "!!!"}',
    "base64 with a character too many": b'{"image": "' + _BASE64.encode() + b'A"}',
    "a lone surrogate": b'{"image": "\\ud800"}',
    "two images": f'{{"image": "{_BASE64}", "image": "{_BASE64}"}}'.encode(),
    "two images, one escaped": f'{{"image": "{_BASE64}", "\\u0069mage": "{_BASE64}"}}'.encode(),
    "a parameter twice": f'{{"image": "{_BASE64}", "model": "null", "model_name": "null"}}'.encode(),
    "a parameter that is not a number": f'{{"image": "{_BASE64}", "confidence": NaN}}'.encode(),
    "a number of 100,000 digits": f'{{"image": "{_BASE64}", "max_detections": {"9" * 60_000}}}'.encode(),
    "a list of 10 MB": f'{{"image": "{_BASE64}", "classes": [{"1," * 5_000_000}1]}}'.encode(),
    "an unknown member": f'{{"image": "{_BASE64}", "__class__": 1}}'.encode(),
    "something behind it": f'{{"image": "{_BASE64}"}} x'.encode(),
}


@pytest.mark.parametrize("name", ACCEPTED_FORMS)
async def test_an_unusual_form_is_read(gateway: Gateway, name: str) -> None:
    """Row 36: what a form may contain is no error, and file names are neither used nor repeated."""
    answer = await ask(gateway.url, encode(ACCEPTED_FORMS[name], Content_Type=_FORM))

    assert answer.status == 200, answer.body
    assert "x-canary" not in answer.headers
    assert b"passwd" not in answer.body


@pytest.mark.parametrize("name", REJECTED_FORMS)
async def test_a_broken_form_is_rejected(gateway: Gateway, name: str) -> None:
    """Row 36: a form that is malformed or has too much of something is answered with 400, or as the image that it contains."""
    answer = await ask(gateway.url, encode(REJECTED_FORMS[name], Content_Type=_FORM))

    assert answer.status == 400, answer.body
    assert json.loads(answer.body)["status"] == 400


@pytest.mark.parametrize("name", REJECTED_TYPES)
async def test_a_broken_boundary_is_rejected(gateway: Gateway, name: str) -> None:
    """Row 36: a form whose boundary is missing or broken is answered with 400."""
    answer = await ask(gateway.url, encode(_FILE + _END, Content_Type=REJECTED_TYPES[name]))

    assert answer.status == 400, answer.body


@pytest.mark.parametrize("name", REJECTED_JSON)
async def test_broken_json_is_rejected(gateway: Gateway, name: str) -> None:
    """Row 36: JSON that is malformed, or is not the object that it should be, is answered with 400."""
    with unharmed(gateway):
        answer = await ask(gateway.url, encode(REJECTED_JSON[name], Content_Type="application/json"))

    assert answer.status == 400, answer.body


async def test_damaged_bodies_do_no_harm(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 36: whatever is done to a form or to JSON, the answer is one of those that say what is wrong."""
    random = Random(_SEED)  # noqa: S311 - the same bodies in each run
    valid = [(_FORM, body) for body in ACCEPTED_FORMS.values()]
    valid += [("application/json", json.dumps({"image": _BASE64, "classes": ["nothing", 0], "confidence": 0.5}).encode())] * 4
    cases = []
    for number in range(_DAMAGED):
        declared, body = valid[number % len(valid)]
        cases.append(Case(f"damaged body {number}", encode(corpus.damage(body, random), Content_Type=declared)))

    with unharmed(gateway):
        answers = await ask_all(gateway.url, cases)

    record_figure("damaged forms and JSON sent", len(answers))
    assert {answer.status for _, answer in answers} <= {200, 400, 404, 413, 415, 422}
