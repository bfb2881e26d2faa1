"""Served boxes against the reference detector."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main
from bench.experiments import accuracy
from bench.harness.reference_detector import Box
from tests.fakes.http import serving

ANSWER = {"detections": [{"class_id": 15, "confidence": 0.9, "x1": 1.0, "y1": 1.0, "x2": 9.0, "y2": 9.0}]}


class Pipeline(BaseHTTPRequestHandler):
    """A stub pipeline that finds the same box in every image."""

    def do_POST(self) -> None:
        assert self.path == "/predict/yolo11n?confidence=0.25&boxes=pixel&max_detections=300"
        self.rfile.read(int(self.headers["content-length"]))
        body = msgspec.json.encode(ANSWER)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None: ...


class FakeReference:
    def __init__(self, name: str, network: Path) -> None:
        assert (name, network) == ("yolo11n", Path("network.onnx"))

    def detect(self, _image: bytes) -> list[Box]:
        return [Box(15, 0.9, (1.0, 1.0, 9.0, 9.0)), Box(3, 0.9, (0.0, 0.0, 1.0, 1.0))]


def test_the_agreement_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(accuracy, "ReferenceDetector", FakeReference)
    with serving(Pipeline) as url:
        code = main(["accuracy", "--url", url, "--network", "network.onnx"])

    assert code == 0
    assert capsys.readouterr().out == "yolo11n: F1 0.6667 on 3 images: 6 boxes expected, 3 served, 3 matched\n"


def test_what_the_caller_can_correct_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without images, a model that pull does not know, and a server that does not answer."""
    monkeypatch.setattr(accuracy, "ReferenceDetector", FakeReference)
    commands = {
        "contains no JPEG": ["--images", str(tmp_path)],
        "is not a model that pull knows": ["--model", "other"],
        "http://127.0.0.1:1: ": ["--network", "network.onnx"],
    }
    for message, options in commands.items():
        assert main(["accuracy", "--url", "http://127.0.0.1:1", *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
