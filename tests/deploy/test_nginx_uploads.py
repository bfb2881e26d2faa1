"""Large bodies, which NGINX writes to files before the gateway checks their key, with a small disk for them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import create_connection
from struct import pack, unpack
from urllib.parse import urlsplit

import httpx
import pytest

from bench.harness.processes import running
from tests.fakes.http import serving
from tests.faults.test_resources import NEEDS_MOUNTS
from tests.nginx import Proxy, prepare
from tests.processes import wait_for

pytestmark = [pytest.mark.system, NEEDS_MOUNTS]

DISK = 40 * 2**20
BEGINNING = bytes(2**20)
"""What is sent of a body, of which NGINX writes most to the disk."""
IMAGE = bytes(700_000)
"""NGINX keeps up to 1.25 times `client_body_buffer_size` in memory: 655,360 bytes."""
SMALL = bytes(600_000)

HEADERS, SETTINGS = 1, 4
"""Kinds of frames of HTTP/2."""
GET = b"\x82\x87\x84\x01\x06nereid"
"""GET https://nereid/"""


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with serving(Upstream) as url:
        made = prepare([urlsplit(url).netloc], tmp_path, {"body_timeout 10s": "body_timeout 60s"})
        (body := tmp_path / "body").mkdir()
        mount = f'mount -t tmpfs -o size={DISK} tmpfs {body} && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", *made.command]
        port = int(made.local_url.rpartition(":")[2])
        with running(command, {}, port, "/readyz", tmp_path / "nginx.log"):
            yield made


def frame(kind: int, stream: int, content: bytes = b"") -> bytes:
    """Encode a frame of HTTP/2, after which the stream goes on."""
    return pack(">IBBI", len(content), kind, 4 if kind == HEADERS else 0, stream)[1:] + content


def head(length: str, path: str = "/detect") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: nereid\r\nExpect: 100-continue\r\n{length}\r\n\r\n".encode()


@contextmanager
def uploads(proxy: Proxy, address: str, count: int, request: bytes, beginning: bytes = BEGINNING) -> Iterator[int]:
    """Send the beginnings of so many bodies without a key from one address, and wait; yields how many NGINX has accepted."""
    with ExitStack() as stack:
        accepted = 0
        for _ in range(count):
            bare = create_connection(("127.0.0.1", urlsplit(proxy.url).port), timeout=30, source_address=(address, 0))
            connection = stack.enter_context(proxy.trust.wrap_socket(bare, server_hostname="localhost"))
            connection.sendall(request)
            status = connection.recv(12)[-3:]
            assert status in {b"100", b"429"}
            if status == b"100":
                connection.sendall(beginning)
                accepted += 1
        yield accepted


def post(proxy: Proxy, body: bytes, address: str = "127.0.0.99") -> httpx.Response:
    transport = httpx.HTTPTransport(verify=proxy.trust, local_address=address)
    with httpx.Client(transport=transport, base_url=proxy.url, timeout=60) as client:
        return client.post("/detect", content=body)


@pytest.mark.parametrize("path", ["/detect", "/detect/batch", "/deepstack/v1/vision/detection", "/livez", "/models"])
def test_address_may_send_eight_large_bodies_at_once(proxy: Proxy, path: str) -> None:
    """Without the limit, large bodies would fill the disk."""
    with uploads(proxy, "127.0.0.40", 60, head("Content-Length: 50000000", path)) as accepted:
        assert accepted == 8
        assert post(proxy, IMAGE, "127.0.0.40").status_code == 200


@pytest.mark.parametrize(
    ("length", "beginning"), [("Content-Length: 10000000", BEGINNING), ("Transfer-Encoding: chunked", b"100000\r\n" + BEGINNING)]
)
def test_unfinished_bodies_do_not_keep_other_addresses_out(proxy: Proxy, length: str, beginning: bytes) -> None:
    """A limit for all of them together could be exhausted without sending anything."""
    with ExitStack() as stack:
        accepted = [
            stack.enter_context(uploads(proxy, f"127.0.0.{last}", 10, head(length), beginning[:9])) for last in range(41, 47)
        ]
        answers = [post(proxy, body) for body in (IMAGE, SMALL, bytes(10_000_000))]

    assert accepted == [8] * 6
    assert [answer.status_code for answer in answers] == [200, 200, 200]


def test_in_http_2_a_get_may_have_a_body_too(proxy: Proxy) -> None:
    """Without a length; 32 are enough for the requests of a browser, which have none."""
    proxy.trust.set_alpn_protocols(["h2"])
    bare = create_connection(("127.0.0.1", urlsplit(proxy.url).port), timeout=30)
    refused: set[int] = set()
    with proxy.trust.wrap_socket(bare, server_hostname="localhost") as connection, connection.makefile("rb") as received:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0))
        for number in range(40):
            connection.sendall(frame(HEADERS, 2 * number + 1, GET))
        while len(refused) < 8:
            length, kind, _, stream = unpack(">IBBI", b"\0" + received.read(9))
            received.read(length)
            if kind == HEADERS:
                refused.add(stream)

    assert refused == set(range(65, 80, 2))


def test_a_full_disk_is_not_an_error_of_the_gateway(proxy: Proxy) -> None:
    answers = []

    def is_served() -> bool:
        answers.append(post(proxy, IMAGE))
        return answers[-1].status_code == 200

    with uploads(proxy, "127.0.0.40", 90, head("Content-Length: 9000000"), BEGINNING[:600_000]):  # of each, 512 KiB are written
        wait_for(lambda: not is_served())
        assert post(proxy, SMALL).status_code == 200
    answer = answers[-1]
    wait_for(is_served)

    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "gateway_unavailable", "1")
    assert "no room for the body" in answer.json()["detail"]
