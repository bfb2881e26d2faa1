"""NGINX with the shipped files in front of an instance that does as it is told: errors, headers, origins, and large bodies."""

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import create_connection, create_server, socket
from subprocess import Popen
from threading import Event
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import pytest

from app.host.http import get_status
from bench.harness.processes import environment_of, running
from tests.deploy.test_nginx import assert_problem, exchange, get
from tests.fakes.http import Handler, serving
from tests.faults.test_resources import NEEDS_MOUNTS
from tests.networks import NEEDS_NETWORKS, enter, ip, network
from tests.nginx import SHIPPED, Proxy, prepare, proxying
from tests.processes import wait_for
from tests.sockets import NEEDS_IPV6
from tests.support import ROOT, free_port

pytestmark = pytest.mark.system

INSTANCES = 3
ORIGIN = "https://app.example.org"
BEGINNING = bytes(2**20)
"""What is sent of a body, of which NGINX writes most to the disk."""
IMAGE, SMALL = bytes(700_000), bytes(600_000)
"""NGINX keeps up to 1.25 times `client_body_buffer_size` in memory: 655,360 bytes."""


class Instance(Handler):
    """An instance that is ready, and does with other requests what their path says."""

    seen: ClassVar[list[dict[str, str]]] = []
    """Headers of each request with a body."""
    is_over: ClassVar[Event]

    def do_GET(self) -> None:  # noqa: N802
        self.answer()

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        if self.path == "/predict/hangs":
            self.is_over.wait()
        if self.path == "/predict/breaks":
            self.close_connection = True
        else:
            self.answer(status=int(self.path.removeprefix("/predict/")) if self.path[-1].isdigit() else 200)


@pytest.fixture
def published() -> int:
    """The port that the Compose files publish for this machine."""
    return free_port()


@pytest.fixture
def disk() -> int:
    """Bytes of the disk for bodies; 0: it is not a small one."""
    return 0


@pytest.fixture
def proxy(published: int, disk: int, tmp_path: Path) -> Iterator[Proxy]:
    """NGINX as in containers, with an origin in its map, in front of three times the same instance."""
    Instance.seen.clear()
    Instance.is_over = Event()
    changes = {"read_timeout 25s": "read_timeout 1s", "body_timeout 10s": "body_timeout 60s", f'# "{ORIGIN}"': f'"{ORIGIN}"'}
    with serving(Instance) as url:
        made = prepare([urlsplit(url).netloc] * INSTANCES, tmp_path, changes)
        port = made.local_url.rpartition(":")[2]
        text = (SHIPPED / "local.compose.conf").read_text(encoding="utf-8")
        text = text.replace("127.0.0.1:4603", f"127.0.0.1:{port}").replace("listen 4604", f"listen 127.0.0.1:{published}")
        with (tmp_path / "upstream.conf").open("a", encoding="utf-8") as file:
            file.write(text)
        (body := tmp_path / "body").mkdir()
        mount = f'mount -t tmpfs -o size={disk} tmpfs {body} && exec "$@"'
        wrapper = ["unshare", "--mount", "sh", "-c", mount, "sh"] if disk else []
        with running([*wrapper, *made.command], {}, int(port), "/readyz", tmp_path / "nginx.log"):
            yield made
        Instance.is_over.set()


def post(proxy: Proxy, path: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
    return exchange(proxy, "\r\n".join([get(path, "POST"), "Content-Length: 1", *headers]), b"x")


def test_each_instance_is_asked_once_until_one_answers(proxy: Proxy) -> None:
    """Errors of the gateway are passed on: under overload, other instances would make more of it."""
    for number, status in enumerate((400, 413, 429, 500, 502, 503, 504), 1):
        assert post(proxy, f"/predict/{status}")[::2] == (status, b"")
        assert len(Instance.seen) == number
    Instance.seen.clear()
    answer = post(proxy, "/predict/breaks")

    assert_problem(answer, 503, "gateway_unavailable")
    assert answer[1]["retry-after"] == "1"
    assert len(Instance.seen) == INSTANCES
    assert_problem(post(proxy, "/predict/hangs"), 504, "gateway_timeout")  # the gateway itself keeps its deadlines


def test_address_of_a_container_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """Nobody answers there, not even with a refusal: as the queue of the socket is full, packets are dropped."""
    with serving(Instance) as url, create_server(("127.0.0.1", 0), backlog=0) as gone, ExitStack() as stack:
        for _ in range(4):
            (waiting := stack.enter_context(socket())).settimeout(0)
            waiting.connect_ex(gone.getsockname())
        servers = ["127.0.0.1:{1}".format(*gone.getsockname()), urlsplit(url).netloc]
        with proxying(servers, tmp_path) as proxy:
            assert [post(proxy, "/predict/200")[0] for _ in range(4)] == [200] * 4
            wait_for(lambda: len([line for line in proxy.log_lines() if line["request"] == "POST /predict/200"]) == 4)
            assert "504, 200" in {line["upstream_status"] for line in proxy.log_lines()}


@NEEDS_IPV6
@NEEDS_NETWORKS
def test_pod_with_ipv6_alone_is_reached(tmp_path: Path) -> None:
    """By its kubelet, and by NGINX, whose public ports have both families; with the setting of the images."""
    (host,) = re.findall(r"NEREID_HOST=(\S+)", (ROOT / "Containerfile").read_text(encoding="utf-8"))
    environment = environment_of(ROOT) | {"NEREID_HOST": host, "NEREID_TRITON_ENDPOINTS": "[::1]:1"}
    proxy = prepare([pod := "[fd00::7]:4603"], tmp_path)
    urls = [f"{url}/livez" for url in (f"http://{pod}", proxy.local_url, proxy.plain_url.replace("127.0.0.1", "[::1]"))]
    with network(name := f"nereid-{os.getpid()}"), ExitStack() as stack:
        ip("-n", name, "address", "add", "fd00::7/64", "dev", "lo", "nodad")
        for command in ([sys.executable, "-m", "app", "api"], proxy.command):
            process = stack.enter_context(Popen(["ip", "netns", "exec", name, *command], env=environment))
            stack.callback(process.terminate)
        inside = stack.enter_context(ThreadPoolExecutor(1, initializer=enter, initargs=(name,)))
        wait_for(lambda: [*inside.map(partial(get_status, seconds=1), urls)] == [200, 200, 308])


def test_gateway_is_told_who_asks_by_nginx_alone(proxy: Proxy) -> None:
    lies = ["X-Real-IP: 192.0.2.1", "X-Forwarded-For: 192.0.2.2", "X-Forwarded-Proto: http", "Forwarded: for=192.0.2.3"]
    post(proxy, "/predict/200", *lies, "X-Request-ID: mine", "Authorization: Bearer camera-1.secret")
    (headers,) = Instance.seen

    assert "192.0.2" not in str(headers)
    assert headers["x-real-ip"] == headers["x-forwarded-for"] == "127.0.0.1"
    assert headers["x-forwarded-proto"] == "https"
    assert (headers["x-request-id"], headers["authorization"]) == ("mine", "Bearer camera-1.secret")


def test_pages_of_listed_origins_and_the_published_port_get_what_is_theirs(proxy: Proxy, published: int) -> None:
    transport = httpx.HTTPTransport(verify=proxy.trust, local_address="127.0.0.9")
    with httpx.Client(transport=transport, base_url=proxy.url) as client:
        listed, other = (client.get("/no/such/path", headers={"Origin": origin}) for origin in (ORIGIN, "https://example.org"))
        changes = {method: client.request(method, "/models/tiny").status_code for method in ("GET", "OPTIONS", "POST", "DELETE")}

    assert listed.headers["access-control-allow-origin"] == ORIGIN
    assert listed.headers["access-control-expose-headers"] == "Retry-After, X-Request-ID"
    assert "access-control-allow-origin" not in other.headers
    # The last two are for this machine; the instance has no OPTIONS.
    assert changes == {"GET": 200, "OPTIONS": 501, "POST": 403, "DELETE": 403}
    assert httpx.get(f"http://127.0.0.1:{published}/metrics").status_code == 200


def head(length: str, path: str = "/detect") -> bytes:
    return f"{get(path, 'POST')}\r\nExpect: 100-continue\r\n{length}\r\n\r\n".encode()


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


def send(proxy: Proxy, body: bytes, address: str = "127.0.0.99") -> httpx.Response:
    transport = httpx.HTTPTransport(verify=proxy.trust, local_address=address)
    with httpx.Client(transport=transport, base_url=proxy.url, timeout=60) as client:
        return client.post("/detect", content=body)


def test_address_may_send_eight_large_bodies_and_have_a_hundred_requests(proxy: Proxy) -> None:
    """Without the first limit, large bodies would fill the disk."""
    for last, path in enumerate(("/detect/batch", "/deepstack/v1/vision/detection", "/livez"), 40):
        with uploads(proxy, address := f"127.0.0.{last}", 20, head("Content-Length: 50000000", path)) as accepted:
            assert accepted == 8
            assert send(proxy, IMAGE, address).status_code == 200
    with uploads(proxy, "127.0.0.30", 105, head("Content-Length: 100000"), BEGINNING[:9]) as accepted:
        assert accepted == 100
        assert send(proxy, SMALL, "127.0.0.30").status_code == 429
        assert send(proxy, SMALL, "127.0.0.31").status_code == 200


@pytest.mark.parametrize(
    ("length", "beginning"), [("Content-Length: 10000000", BEGINNING), ("Transfer-Encoding: chunked", b"100000\r\n" + BEGINNING)]
)
def test_unfinished_bodies_do_not_keep_other_addresses_out(proxy: Proxy, length: str, beginning: bytes) -> None:
    """A limit for all of them together could be exhausted without sending anything."""
    with ExitStack() as stack:
        begun = [uploads(proxy, f"127.0.0.{last}", 10, head(length), beginning[:9]) for last in range(41, 47)]
        assert [stack.enter_context(each) for each in begun] == [8] * 6
        assert [send(proxy, body).status_code for body in (IMAGE, SMALL, bytes(10_000_000))] == [200] * 3


@NEEDS_MOUNTS
@pytest.mark.parametrize("disk", [40 * 2**20])
def test_full_disk_is_not_an_error_of_the_gateway(proxy: Proxy) -> None:
    answers: list[httpx.Response] = []

    def is_served() -> bool:
        answers.append(send(proxy, IMAGE))
        return answers[-1].status_code == 200

    with uploads(proxy, "127.0.0.40", 90, head("Content-Length: 9000000"), BEGINNING[:600_000]):  # of each, 512 KiB are written
        wait_for(lambda: not is_served())
        assert send(proxy, SMALL).status_code == 200
    answer = answers[-1]
    wait_for(is_served)

    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "gateway_unavailable", "1")
    assert "no room for the body" in answer.json()["detail"]
