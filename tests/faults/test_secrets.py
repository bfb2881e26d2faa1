"""Canaries in everything that a caller sends: none of them is in a log, an answer or a header.

The value of a parameter may be in the answer that rejects it, but not in a log either.
"""

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from app.api.caller import keys
from app.triton.shared_memory import SHM
from bench.harness.triton import Triton
from tests.faults.exchange import Answer, ask, encode
from tests.faults.serving import Gateway, serving
from tests.imaging.samples import NOISE
from tests.imaging.samples import encode as encode_image

pytestmark = pytest.mark.system

_CANARY = "canary7f3a"
"""Begins every canary; what follows tells where it was sent."""
_VALUE = "value9c4e"
"""The same for the values of parameters."""


class Guarded(NamedTuple):
    """A gateway that needs keys, logs all it can, and the credential that it accepts."""

    gateway: Gateway
    credential: str


@pytest.fixture(scope="module")
def guarded(null_triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    credential, table = keys.create("camera-1")
    file = folder / "keys.toml"
    file.write_text(table, encoding="utf-8")
    settings = {"api_keys_file": file, "log_level": "debug", "max_file_size_mb": 1}
    with serving(null_triton, folder, settings=settings) as gateway:
        yield Guarded(gateway, credential)


def _image() -> bytes:
    exif = Image.Exif()
    exif[270] = f"{_CANARY}-exif"
    return encode_image(NOISE, "JPEG", exif=exif, comment=f"{_CANARY}-comment".encode())


def _form(image: bytes, field: str = "confidence", value: str = "0.5") -> bytes:
    return b"".join(
        [
            f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode(),
            f'--x\r\nContent-Disposition: form-data; name="image"; filename="{_CANARY}-filename.jpg"\r\n\r\n'.encode(),
            image,
            b"\r\n--x--\r\n",
        ]
    )


def _requests(credential: str) -> Iterator[tuple[int, bytes]]:
    """Make requests with canaries, and the status that each must be answered with."""
    image, form = _image(), "multipart/form-data; boundary=x"
    allowed = {"X_API_Key": credential}
    headers = {name: f"{_CANARY}-{name}" for name in ("Cookie", "User_Agent", "Referer", "X_Forwarded_For", "X_Token", "Accept")}
    known_id = credential.partition(".")[0]
    yield 200, encode(image, **allowed, **headers)
    yield 200, encode(image, Authorization=f"Bearer {credential}", Content_Type=f"image/jpeg; name={_CANARY}-type")
    yield 200, encode(_form(image), **allowed, Content_Type=form)
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
        yield 400, encode(_form(image, name, f"{_VALUE}-form"), **allowed, Content_Type=form)
        text = json.dumps({"image": base64.b64encode(image).decode(), name: f"{_VALUE}-json"})
        yield 400, encode(text.encode(), **allowed, Content_Type="application/json")
    url = f"https://host.example/{_VALUE}-path?token={_VALUE}-token"
    for text in (
        json.dumps({"image": url}),
        json.dumps({f"image {_VALUE}-member": ""}),
        f"img={url}",
        f"{_VALUE}-field=1&boxes=coco",
    ):
        yield 400, encode(text.encode(), **allowed, Content_Type="application/x-www-form-urlencoded")
    for field in (f"{_VALUE}-field", "confidence"):
        yield 400, encode(_form(image, field).replace(b'"image"', f'"{_VALUE}-name"'.encode()), **allowed, Content_Type=form)
    yield 400, encode(_form(image)[:-20], **allowed, Content_Type=form)
    yield 200, encode(_form(image).replace(b"-filename", b"-not-utf-8-\xff"), **allowed, Content_Type=form)
    yield 400, encode(b'{"image": "' + base64.b64encode(image) + b"!", **allowed, Content_Type="application/json")
    yield 422, encode(image[: len(image) // 2], **allowed)
    yield 415, encode(f"{_CANARY}-text".encode() * 20, **allowed)
    yield 413, encode(image + bytes(2**20), **allowed)


async def test_no_secret_comes_out(guarded: Guarded, null_triton: Triton) -> None:
    """Nor does an answer contain a name of a shared memory region, or anything of a programming language."""
    gateway, credential = guarded
    secret = credential.partition(".")[2]
    log_from = len(gateway.log.read_bytes())
    answers: list[Answer] = []
    for status, request in _requests(credential):
        answers.append(await ask(gateway.url, request))
        assert answers[-1].status == status, (request[:200], answers[-1].body)

    said = {
        "log": gateway.log.read_bytes()[log_from:],
        "Triton's log": _read_logs(Path(null_triton.settings.triton_home)),
        "answers": b"".join(repr(answer).encode() for answer in answers),
    }
    found = [
        (where, repr(text[max(0, at - 80) : at + 80]))
        for where, text in said.items()
        for at in _places(text, secret, _CANARY, *([] if where == "answers" else [_VALUE]))
    ]
    assert found == []
    words = ("Traceback", ".py", "/tmp", "/home", str(SHM), "nereid-", "PIL", "msgspec")  # noqa: S108
    assert [word for word in words if word.encode() in said["answers"]] == []
    assert b'"status":422' in said["log"]


async def test_a_key_is_not_visible_to_other_users_of_the_host(guarded: Guarded) -> None:
    secret = guarded.credential.partition(".")[2]
    for process in (guarded.gateway.process, *guarded.gateway.workers()):
        assert secret not in " ".join(process.cmdline())
        assert secret not in str(process.environ())
    assert secret not in str(dict(os.environ))


def _places(text: bytes, *secrets: str) -> list[int]:
    """Return where secrets occur in a text: plain, in hex or in base64."""
    forms = [form for secret in secrets for form in (secret.encode(), secret.encode().hex().encode())]
    forms += [base64.b64encode(bytes(skip) + secret.encode())[4:12] for secret in secrets for skip in range(3)]
    return [match.start() for form in forms for match in re.finditer(re.escape(form), text)]


def _read_logs(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("*.log"))
