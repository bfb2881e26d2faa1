"""The function of `examples/cvat`, without CVAT's SDK, asks servers that redirect, stay busy, or are not Nereid."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.http import serving
from tests.support import ROOT

Answer = tuple[int, dict[str, str], bytes]


class BadFunctionError(Exception):
    """Stands for the one of CVAT's SDK, which `cvat-cli` prints."""


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The function's entry point."""
    names = ("cvat_sdk", "cvat_sdk.auto_annotation", "cvat_sdk.models")
    sdk, auto_annotation, models = modules = [ModuleType(name) for name in names]
    vars(auto_annotation).update(BadFunctionError=BadFunctionError, DetectionFunctionContext=object, DetectionFunctionSpec=dict)
    vars(models).update(LabeledShapeRequest=object, PatchedLabelRequest=object)
    vars(sdk).update(auto_annotation=auto_annotation, models=models)
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    made: Callable[..., Any] = run_path(str(ROOT / "examples" / "cvat" / "nereid_function.py"))["create"]
    return made


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[str | None]]]:
    """Answer one request after another; yield the URL, and the keys in the requests so far."""
    left, keys = iter(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["X-API-Key"])
            status, headers, body = next(left)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield url, keys


FOUND: list[Answer] = [
    (200, {}, b'{"default": "tiny"}'),
    (200, {}, b'{"metadata": {"annotations": {"spec": "[]"}}}'),
]


def test_a_redirect_does_not_take_the_key_to_another_host(create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a line break after the key, as from a file, show it in an error."""
    monkeypatch.setenv("NEREID_KEY", "camera.secret\n")
    with (
        answering(*FOUND) as (other, stolen),
        answering((308, {"Location": f"{other}/models"}, b"")) as (url, keys),
        pytest.raises(BadFunctionError, match="Nereid answers 308 to /models"),
    ):
        create(url)

    assert (keys, stolen) == (["camera.secret"], [])


def test_the_wait_is_not_as_long_as_any_server_likes(create: Callable[..., Any]) -> None:
    with answering((503, {"Retry-After": "1000000000"}, b""), *FOUND) as (url, keys):
        create(url)

    assert len(keys) == 1 + len(FOUND)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(200, {}, b"<html>Sign in</html>")], "the answer is not that of Nereid"),
        ([(200, {}, b"\xff\xfe")], "the answer is not that of Nereid"),
        ([(200, {}, b"[]")], "the answer is not that of Nereid"),
        ([FOUND[0], (200, {}, b'{"metadata": null}')], "the answer is not that of Nereid"),
        ([(404, {}, b"\xff no")], "Nereid answers 404 to /models: \ufffd no"),
    ],
)
def test_an_answer_that_is_not_nereids_ends_the_command(create: Callable[..., Any], answers: list[Answer], said: str) -> None:
    with answering(*answers) as (url, _), pytest.raises(BadFunctionError, match=said):
        create(url)
