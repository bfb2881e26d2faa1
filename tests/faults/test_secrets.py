"""Canaries in everything that a caller sends: none of them is in a log, an answer or a header.

The value of a parameter may be in the answer that rejects it, but not in a log either.
"""

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from app.api.caller import keys
from app.triton.shared_memory import SHM
from bench.harness.triton import Triton
from tests.faults.exchange import Answer, ask, encode
from tests.faults.serving import serving
from tests.imaging.samples import NOISE
from tests.imaging.samples import encode as encode_image

_CANARY = "canary7f3a"
"""Begins every canary; what follows tells where it was sent."""
_VALUE = "value9c4e"
"""The same for the values of parameters."""
_FORM, _JSON = "multipart/form-data; boundary=x", "application/json"
_URL = f"https://host.example/{_VALUE}-path?token={_VALUE}-token"


def _image() -> bytes:
    exif = Image.Exif()
    exif[270] = f"{_CANARY}-exif"
    return encode_image(NOISE, "JPEG", exif=exif, comment=f"{_CANARY}-comment".encode())


def _form(image: bytes, field: str = "confidence", value: str = "0.5") -> bytes:
    fields = f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
    file = f'--x\r\nContent-Disposition: form-data; name="image"; filename="{_CANARY}-filename.jpg"\r\n\r\n'
    return (fields + file).encode() + image + b"\r\n--x--\r\n"


def _requests(credential: str) -> Iterator[tuple[int, bytes]]:
    """Make requests with canaries, and the status that each must be answered with."""
    image, allowed = _image(), {"X_API_Key": credential}
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
