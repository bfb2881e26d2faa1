"""Forms and JSON that are broken or crafted: the answer says so, and nothing breaks."""

import base64
import json
from random import Random

import pytest

from tests.fakes.models import scene
from tests.faults import corpus
from tests.faults.exchange import Case, ask_all, encode
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

ACCEPTED_FORMS = {
    "an image": _FILE + _END,
    "an image and a parameter": _part('; name="confidence"', b"0.5") + _FILE + _END,
    "the other name": _FILE.replace(b'"image"', b'"file"') + _END,
    "a file name that is a path": _FILE.replace(b"scene.png", b"../../../etc/passwd") + _END,
    "a file name with line breaks": _FILE.replace(b"scene.png", b"%0d%0aX-Canary: 1") + _END,
    "base64": _part('; name="image"', _BASE64.encode(), "Content-Transfer-Encoding: base64") + _END,
    "a preamble and an epilogue": b"preamble\r\n" + _FILE + _END + b"epilogue",
}


async def test_damaged_bodies_do_no_harm(gateway: Gateway) -> None:
    """Row 36: an unusual form is read, and whatever is done to it or to JSON, the answer is one of those that say what is wrong."""
    random = Random(_SEED)  # noqa: S311 - the same bodies in each run
    valid = [(_FORM, body) for body in ACCEPTED_FORMS.values()]
    valid += [("application/json", json.dumps({"image": _BASE64, "classes": ["nothing", 0], "confidence": 0.5}).encode())] * 4
    cases = []
    for number in range(_DAMAGED):
        declared, body = valid[number % len(valid)]
        cases.append(Case(f"damaged body {number}", encode(corpus.damage(body, random), Content_Type=declared)))

    with unharmed(gateway):
        usable = await ask_all(gateway.url, [Case(name, encode(body, Content_Type=_FORM)) for name, body in ACCEPTED_FORMS.items()])
        answers = await ask_all(gateway.url, cases)

    assert {name: answer.body for name, answer in usable if answer.status != 200} == {}
    assert {answer.status for _, answer in answers} <= {200, 400, 404, 413, 415, 422}
