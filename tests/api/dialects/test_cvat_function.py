"""The function of `examples/cvat`, without CVAT's SDK, asks a gateway, and servers that redirect, stay busy, or are not Nereid."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from json import dumps
from math import pi
from runpy import run_path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.fakes.http import serving
from tests.support import ROOT

Answer = tuple[int, dict[str, str], bytes]


class BadFunctionError(Exception):
    """Stands for the one of CVAT's SDK, which `cvat-cli` prints."""


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    names = ("cvat_sdk", "cvat_sdk.auto_annotation", "cvat_sdk.models")
    sdk, auto_annotation, models = modules = [ModuleType(name) for name in names]
    vars(auto_annotation).update(BadFunctionError=BadFunctionError, DetectionFunctionContext=object, DetectionFunctionSpec=dict)
    for name in ("label_spec", "skeleton_label_spec", "keypoint_spec", "shape", "skeleton", "keypoint"):
        setattr(auto_annotation, name, lambda *values, **others: (*values, others) if others else values)
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

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield url, keys


FOUND: list[Answer] = [
    (200, {}, b'{"default": "tiny"}'),
    (200, {}, b"{}"),
    (200, {}, b'{"task": "detection", "classes": [], "keypoints": []}'),
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
        ([*FOUND[:2], (200, {}, b"{}")], "the answer is not that of Nereid"),
        (
            [*FOUND[:2], (200, {}, b'{"task": "classification", "detail": null}')],
            "tiny finds no objects: its task is classification",
        ),
        ([*FOUND[:2], (200, {}, b'{"task": null, "detail": "it is not loaded"}')], "tiny finds no objects: it is not loaded"),
        ([(404, {}, b"\xff no")], "Nereid answers 404 to /models: \ufffd no"),
    ],
)
def test_an_answer_that_is_not_nereids_ends_the_command(create: Callable[..., Any], answers: list[Answer], said: str) -> None:
    with answering(*answers) as (url, _), pytest.raises(BadFunctionError, match=said):
        create(url)


NOSE, TAIL = {"name": "nose", "x": 12, "y": 12}, {"name": "tail", "x": 20, "y": 20}


@pytest.mark.parametrize(
    ("task", "label", "detections", "shapes"),
    [
        (
            "segmentation",
            {"type": "polygon"},
            [{"mask": [[0, 0, 4, 0, 4, 4]]}],
            [{"type": "polygon", "points": [0, 0, 4, 0, 4, 4]}],
        ),
        (
            "segmentation",
            {"type": "polygon"},
            [{"mask": []}, {"mask": [[1, 2], [3, 4]]}],
            [{"type": "polygon", "points": points, "group": 2} for points in ([1, 2], [3, 4])],
        ),
        (
            "pose",
            [("nose", 0), ("tail", 1)],
            [
                {"keypoints": [NOSE | {"confidence": 0.5}, TAIL | {"confidence": 0.4}]},
                {"keypoints": [NOSE | {"confidence": 0.1}]},
                {"keypoints": [NOSE]},
            ],
            [
                [(0, [12, 12], {"outside": False}), (1, [20, 20], {"outside": True})],
                [(0, [12, 12], {"outside": False})],
            ],
        ),
        (
            "obb",
            {"type": "rectangle"},
            [{"corners": [[44, 0], [44, 16], [36, 16], [36, 0]], "rotation": pi / 2}],
            [{"type": "rectangle", "points": [32, 4, 48, 12], "rotation": 90}],
        ),
    ],
)
def test_shapes_are_those_of_the_task(
    create: Callable[..., Any], task: str, label: object, detections: list[dict[str, Any]], shapes: list[object]
) -> None:
    found = {"detections": [{"class_name": "dog", "x1": 0, "y1": 0, "x2": 9, "y2": 9, **one} for one in detections]}
    described = {"task": task, "classes": ["cat", "dog", "dog"], "keypoints": ["nose", "tail"] if task == "pose" else []}
    documents = [{"gate": {"to": "tiny:2"}}, described, found]
    with answering(*((200, {}, dumps(document).encode()) for document in documents)) as (url, keys):
        function = create(url, "gate")
        described_shapes = function.detect(SimpleNamespace(conf_threshold=None), Image.new("RGB", (64, 32)))

    assert function.spec == {"labels": [("cat", 0, label), ("dog", 1, label)]}
    assert described_shapes == [(1, shape) for shape in shapes]
    assert len(keys) == len(documents)
