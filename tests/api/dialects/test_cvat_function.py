"""The function of `examples/cvat`, without CVAT's SDK, asks servers that redirect, stay busy, or are not Nereid."""

import sys
from collections.abc import Callable
from runpy import run_path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.fakes.http import scripted
from tests.support import ROOT


class BadFunctionError(Exception):
    """Stands for the one of CVAT's SDK, which `cvat-cli` prints."""


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    sdk = MagicMock()
    sdk.auto_annotation.BadFunctionError = BadFunctionError
    for name, module in {"cvat_sdk": sdk, "cvat_sdk.auto_annotation": sdk.auto_annotation}.items():
        monkeypatch.setitem(sys.modules, name, module)
    made: Callable[..., Any] = run_path(str(ROOT / "examples" / "cvat" / "nereid_function.py"))["create"]
    return made


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body


MODEL = [answer(b'{"default": "tiny"}'), answer(b"{}")]
DETECTOR = [*MODEL, answer(b'{"task": "detection", "classes": [], "keypoints": []}')]


def test_redirect_does_not_take_the_key_to_another_host(create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a line break after the key, as from a file, show it in an error."""
    monkeypatch.setenv("NEREID_KEY", "camera.secret\n")
    with scripted(*DETECTOR) as other:
        redirect = answer(b"", "308 Permanent Redirect", f"Location: {other.url}/models")
        with scripted(redirect) as server, pytest.raises(BadFunctionError, match="Nereid answers 308 to /models"):
            create(server.url)

    assert [b"X-API-Key: camera.secret\r\n" in asked for asked in server.asked] == [True]
    assert other.asked == []


def test_answer_that_is_not_nereids_ends_the_command(create: Callable[..., Any]) -> None:
    rows = [
        ([answer(b"<html>Sign in</html>")], "the answer is not that of Nereid"),
        ([*MODEL, answer(b'{"task": "classification", "detail": null}')], "tiny finds no objects"),
    ]
    for answers, said in rows:
        with scripted(*answers) as server, pytest.raises(BadFunctionError, match=said):
            create(server.url)
