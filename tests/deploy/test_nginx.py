"""NGINX with the shipped files in front of three instances: routes, TLS, limits, errors, addresses, and instances that end."""

import asyncio
import json
import re
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from app.api.answering.schema import Problem
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.deploy.units import NEREID
from tests.fakes.http import serving
from tests.faults.fleet import Fleet, running_fleet
from tests.nginx import Proxy, proxying
from tests.processes import no_process_left, wait_for
from tests.support import SCENE, finds
from tests.support import json as json_of

pytestmark = pytest.mark.system

MEDIA_TYPE = "application/problem+json"
INSTANCES = 3
DETECT = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"


class Service(NamedTuple):
    proxy: Proxy
    fleet: Fleet

    @property
    def sockets(self) -> list[str]:
        return [f"unix:{socket}" for socket in self.fleet.sockets]


@pytest.fixture(scope="module")
def service(settings: Settings, triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    assert triton.poll() is None
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "proxy").mkdir()
    given = {
        "triton_endpoints": settings.triton_address,
        "model": "six_columns",
        "log_level": "info",
    }
    with (
        no_process_left(),
        running_fleet(Path(settings.model_repository), folder, instances=INSTANCES, settings=given) as fleet,
        proxying([f"unix:{socket}" for socket in fleet.sockets], folder / "proxy") as proxy,
    ):
        yield Service(proxy, fleet)


def clients(proxy: Proxy, address: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:  # noqa: ANN401
    transport = httpx.AsyncHTTPTransport(verify=proxy.trust, local_address=address, limits=httpx.Limits(max_connections=8))
    return httpx.AsyncClient(transport=transport, base_url=proxy.url, timeout=60, **options)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with clients(service.proxy) as client:
        yield client


def exchange(proxy: Proxy, request: bytes, url: str = "") -> tuple[int, dict[str, str], bytes]:
    """Send bytes to the public listener, or to another one, and receive the answer."""
    parts = urlsplit(url or proxy.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=30) as bare:
        connection = proxy.trust.wrap_socket(bare, server_hostname="localhost") if parts.scheme == "https" else bare
        connection.sendall(request)
        with connection, connection.makefile("rb") as received:
            status = int(received.readline().split()[1])
            lines = iter(lambda: received.readline().decode("latin-1").rstrip(), "")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return status, headers, received.read(int(headers["content-length"]))


def problem(status: int, headers: dict[str, str] | httpx.Headers, body: bytes) -> dict[str, Any]:
    """Check that an answer has the shape of the gateway's errors; return its JSON."""
    found: dict[str, Any] = json.loads(body)
    assert headers["content-type"] == MEDIA_TYPE
    assert list(found) == list(Problem.__struct_fields__)
    assert (found["status"], found["type"]) == (status, f"urn:nereid:problem:{found['code']}")
    assert found["request_id"] == headers["x-request-id"]
    assert headers["server"] == "nginx"
    return found


@pytest.mark.parametrize("version", ["", "/v1"])
async def test_images_are_detected_and_models_are_listed(client: httpx.AsyncClient, version: str) -> None:
    answer = json_of(await client.post(f"{version}/detect", content=SCENE))
    assert [found["class_name"] for found in answer["detections"]] == ["red", "blue"]
    async with asyncio.timeout(60):
        assert await finds(client)
    assert json_of(await client.get(f"{version}/models"))["default"] == "six_columns"
    assert (await client.get(f"{version}/livez")).status_code == (await client.get(f"{version}/readyz")).status_code == 200


@pytest.mark.parametrize("version", ["", "/v1"])
async def test_lines_of_a_batch_are_passed_on_as_they_come(service: Service, client: httpx.AsyncClient, version: str) -> None:
    """The response to a batch may be larger than an image."""
    files = [("images", ("scene.bmp", SCENE))] * 2 + [("images", ("junk.bin", bytes(30 * 2**20)))] * 2
    response = await client.post(f"{version}/detect/batch", files=files, headers={"Accept": "application/x-ndjson"})
    lines = [json.loads(line) for line in response.content.splitlines()]

    assert sorted(line["status"] for line in lines[:-1]) == [200, 200, 415, 415]
    assert lines[-1]["processed_images"] == 2
    assert "x-accel-buffering" not in response.headers  # NGINX has obeyed it
    declared = f"POST {version}/detect/batch HTTP/1.1\r\nHost: nereid\r\nContent-Length: {2**27 + 1}\r\nConnection: close\r\n\r\n"
    assert problem(*exchange(service.proxy, declared.encode()))["detail"] == "the limit is 128 MiB"


async def test_the_page_is_for_everybody(client: httpx.AsyncClient) -> None:
    page = await client.get("/", headers={"Accept": "text/html"})
    script = await client.get("/page-assets/page.js")

    assert page.headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert script.headers["content-type"].startswith("text/javascript")
    assert json_of(await client.get("/"))["service"] == "Nereid"
    assert json_of(await client.get("/live")) == {"status": "alive"}


PRIVATE = """
/health /metrics /docs /docs/openapi.json /docs-assets/swagger_style.css /ready /v1/health /v1/metrics
"""


@pytest.mark.parametrize("path", PRIVATE.split())
async def test_private_paths_are_only_for_this_machine(service: Service, client: httpx.AsyncClient, path: str) -> None:
    outside = await client.get(path)
    async with httpx.AsyncClient(base_url=service.proxy.local_url, timeout=60) as local:
        inside = await local.get(path)

    assert problem(404, outside.headers, outside.content)["code"] == "not_found"
    assert inside.status_code == 200


PATHS = """
/problem /admin /predict/ /predict/a/b //metrics /metrics/ /%6detrics /v1//metrics /detect/../metrics /detect%2f..%2fmetrics
/predict/x%2f..%2f..%2fmetrics /METRICS
"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_other_path_gets_through(service: Service, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: nereid\r\nConnection: close\r\n\r\n".encode()

    assert problem(404, *exchange(service.proxy, request)[1:])["code"] == "not_found"


@pytest.mark.parametrize("path", ["/metrics/../detect", "/metrics/../v1/predict/six_columns", "/docs/..//detect"])
def test_a_path_that_is_cleaned_up_reaches_no_other_route(service: Service, path: str) -> None:
    """NGINX decides by the path without dots, and passes on what it was sent."""
    request = f"GET {path} HTTP/1.1\r\nHost: nereid\r\nConnection: close\r\n\r\n".encode()
    status, headers, body = exchange(service.proxy, request)

    assert (status, json.loads(body)["code"]) == (404, "not_found")
    assert "x-process-time" in headers  # it is the gateway that does not know it


def test_http_is_redirected(service: Service) -> None:
    status, headers, _ = exchange(
        service.proxy, b"POST /detect?confidence=0.4 HTTP/1.1\r\nHost: nereid\r\nConnection: close\r\n\r\n", service.proxy.plain_url
    )

    assert (status, headers["location"]) == (308, "https://nereid/detect?confidence=0.4")


@pytest.mark.parametrize(("version", "is_accepted"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_old_tls_is_refused(service: Service, version: str, *, is_accepted: bool) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_alpn_protocols(["h2", "http/1.1"])
    parts = urlsplit(service.proxy.url)

    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=30) as bare:
        if is_accepted:
            with context.wrap_socket(bare) as connection:
                assert connection.selected_alpn_protocol() == "h2"
        else:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(bare)


LONG = b"x" * 9000
CHUNKED = DETECT + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + bytes(2**20) + b"\r\n") * 51
FAULTS = {
    "a bad request line": (b"NONSENSE\r\n\r\n", 400, "malformed_request"),
    "no host": (b"GET /detect HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    "a method for proxies": (b"TRACE /detect HTTP/1.1\r\nHost: nereid\r\nConnection: close\r\n\r\n", 405, "method_not_allowed"),
    "a declared length": (DETECT + b"Content-Length: 52428801\r\nConnection: close\r\n\r\n", 413, "body_too_large"),
    "chunks": (CHUNKED, 413, "body_too_large"),
    "a long path": (b"GET /" + LONG + b" HTTP/1.1\r\nHost: nereid\r\n\r\n", 414, "uri_too_long"),
    "a long header": (b"GET /detect HTTP/1.1\r\nHost: nereid\r\nX: " + LONG + b"\r\n\r\n", 431, "header_too_large"),
    "an unknown encoding": (DETECT + b"Transfer-Encoding: gzip\r\n\r\n", 501, "not_implemented"),
    "an unknown version": (b"GET /detect HTTP/3.0\r\nHost: nereid\r\n\r\n", 505, "http_version_not_supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_of_nginx_look_like_those_of_the_gateway(service: Service, fault: str) -> None:
    request, status, code = FAULTS[fault]
    answer = exchange(service.proxy, request)

    assert answer[0] == status
    assert problem(*answer)["code"] == code
    assert "x-process-time" not in answer[1]


def test_http_on_the_port_for_tls_is_an_error_like_others(service: Service) -> None:
    """A key that was sent so has been seen by others: it is no redirect that would hide it."""
    url = service.proxy.url.replace("https", "http")

    assert problem(*exchange(service.proxy, b"GET /livez HTTP/1.1\r\nHost: nereid\r\n\r\n", url))["status"] == 400


class Upstream(BaseHTTPRequestHandler):
    """An instance that is ready, and does with other requests what `path` says."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, dict[str, str]]]] = []
    """Path and headers of each request."""
    is_over: ClassVar[Event]

    def do_GET(self) -> None:
        self.answer(200)

    def do_POST(self) -> None:
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if self.path == "/predict/hangs":
            self.is_over.wait()
        if self.path == "/predict/breaks":
            self.close_connection = True
        else:
            self.answer(int(self.path.removeprefix("/predict/")) if self.path[-1].isdigit() else 200)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Proxy]:
    """NGINX in front of three times the same instance, for which it waits a second."""
    Upstream.seen.clear()
    Upstream.is_over = Event()
    with (
        serving(Upstream) as url,
        proxying([urlsplit(url).netloc] * INSTANCES, tmp_path, {"read_timeout 25s": "read_timeout 1s"}) as proxy,
    ):
        yield proxy
        Upstream.is_over.set()


def post(proxy: Proxy, path: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
    lines = [f"POST {path} HTTP/1.1", "Host: nereid", "Content-Length: 1", "Connection: close", *headers]
    return exchange(proxy, "\r\n".join([*lines, "", "x"]).encode("latin-1"))


def test_every_instance_is_asked_once(upstream: Proxy) -> None:
    """If all break, clients may try again: it is not 502, which is the gateway's answer for a model that does not work."""
    answer = post(upstream, "/predict/breaks")

    assert problem(*answer)["code"] == "gateway_unavailable"
    assert (answer[0], answer[1]["retry-after"]) == (503, "1")
    assert len(Upstream.seen) == INSTANCES


def test_an_instance_that_hangs_is_not_waited_for(upstream: Proxy) -> None:
    """The gateway itself keeps its deadlines, so NGINX need not wait."""
    answer = post(upstream, "/predict/hangs")

    assert (answer[0], problem(*answer)["code"]) == (504, "gateway_timeout")


@pytest.mark.parametrize("status", [400, 404, 413, 429, 500, 502, 503, 504])
def test_an_error_of_the_gateway_is_passed_on_as_it_is(upstream: Proxy, status: int) -> None:
    """No other instance is asked: under overload that would make more of it."""
    assert post(upstream, f"/predict/{status}")[::2] == (status, b"")
    assert len(Upstream.seen) == 1


def test_the_gateway_is_told_who_asks_by_nginx_alone(upstream: Proxy) -> None:
    lies = ["X-Real-IP: 192.0.2.1", "X-Forwarded-For: 192.0.2.2", "X-Forwarded-Proto: http", "Forwarded: for=192.0.2.3"]
    post(upstream, "/predict/200", *lies, "X-Request-ID: mine", "Authorization: Bearer camera-1.secret")
    ((_, headers),) = Upstream.seen

    assert "192.0.2" not in str(headers)
    assert headers["x-real-ip"] == headers["x-forwarded-for"] == "127.0.0.1"
    assert headers["x-forwarded-proto"] == "https"
    assert (headers["x-request-id"], headers["authorization"]) == ("mine", "Bearer camera-1.secret")


async def test_the_log_of_the_gateway_has_the_address_of_the_client(service: Service) -> None:
    """It trusts NGINX, which is on its unix socket, and NGINX trusts nobody."""
    async with clients(service.proxy, "127.0.0.9", headers={"X-Real-IP": "192.0.2.1", "X-Forwarded-For": "192.0.2.2"}) as client:
        request_id = (await client.get("/models")).headers["x-request-id"]

    assert service.fleet.log_of(request_id)["client"] == "127.0.0.9"


@pytest.mark.parametrize(
    ("given", "is_kept"), [("camera-1.42", True), ("x" * 64, True), ("x" * 65, False), ('"}, {', False), ("", False)]
)
async def test_request_id_is_the_same_in_both_logs(
    service: Service, client: httpx.AsyncClient, given: str, *, is_kept: bool
) -> None:
    used = (await client.get("/models", headers={"X-Request-ID": given})).headers["x-request-id"]

    assert (used == given) == is_kept
    assert service.fleet.log_of(used)["path"] == "/models"
    wait_for(lambda: any(line["request_id"] == used for line in service.proxy.log_lines()))


async def test_the_log_has_no_secret(service: Service, client: httpx.AsyncClient) -> None:
    await client.get("/models?canary-query", headers={"X-Request-ID": "by-bearer", "Authorization": "bearer camera-1.canary"})
    await client.get("/nothing?canary-query", headers={"X-Request-ID": "by-header", "X-API-Key": "camera-2.canary"})
    await client.get("/models", headers={"X-Request-ID": "by-basic", "Authorization": "Basic Y2FuYXJ5.canary"})
    wait_for(lambda: {"by-bearer", "by-header", "by-basic"} <= {line["request_id"] for line in service.proxy.log_lines()})
    lines = {line["request_id"]: line for line in service.proxy.log_lines()}

    assert "canary" not in (service.proxy.folder / "access.log").read_text(encoding="utf-8")
    assert [lines[name]["key"] for name in ("by-bearer", "by-header", "by-basic")] == ["camera-1", "camera-2", ""]
    assert lines["by-bearer"]["request"] == "GET /models"
    assert lines["by-bearer"]["upstream"] in service.sockets
    assert (lines["by-bearer"]["status"], lines["by-bearer"]["upstream_status"]) == ("200", "200")


@pytest.fixture
def slow_refill(service: Service, tmp_path: Path) -> Iterator[Proxy]:
    """NGINX in front of the same instances, whose limits let through the shipped bursts, and hardly anything after them."""
    with proxying(service.sockets, tmp_path, {"rate=200r/s": "rate=1r/m", "rate=300r/s": "rate=1r/m"}) as proxy:
        yield proxy


async def statuses(client: httpx.AsyncClient, credentials: Sequence[str]) -> list[int]:
    """Ask for nothing that costs much with each of these keys; return the statuses."""
    answers = await asyncio.gather(*(client.get("/detect", headers={"X-API-Key": credential}) for credential in credentials))
    for answer in answers:
        if answer.status_code == 429:
            assert problem(429, answer.headers, answer.content)["code"] == "rate_limited"
            assert answer.headers["retry-after"] == "1"
    return [answer.status_code for answer in answers]


async def test_each_key_has_a_limit_of_its_own(slow_refill: Proxy) -> None:
    """A stranger who knows only the id of a key does not use the limit up."""
    async with clients(slow_refill, "127.0.0.11") as first, clients(slow_refill, "127.0.0.12") as second:
        stranger = await statuses(first, ["camera-1.guess-guess"] * 210)
        owner = await statuses(second, ["camera-1.secret-secret"] * 150)
        owner += await statuses(first, ["camera-1.secret-secret"] * 60)
        for start in ("Authorization: Bearer ", "authorization: bearer\t", "X-API-Key:", "X-API-Key: \t"):
            request = f"GET /detect HTTP/1.1\r\nHost: nereid\r\n{start}camera-1.secret-secret\r\nConnection: close\r\n\r\n"
            assert exchange(slow_refill, request.encode())[0] == 429
        other = await statuses(first, ["camera-2.secret-secret"] * 20)

    assert (stranger.count(405), stranger.count(429)) == (201, 9)
    assert (owner.count(405), owner.count(429)) == (201, 9)
    assert other == [405] * 20


async def test_each_address_has_a_limit_of_its_own(slow_refill: Proxy) -> None:
    credentials = [f"key-{number}.secret" for number in range(310)]
    async with clients(slow_refill, "127.0.0.21") as first, clients(slow_refill, "127.0.0.22") as second:
        flood = await statuses(first, credentials)
        other = await statuses(second, credentials[:1])
    async with httpx.AsyncClient(base_url=slow_refill.local_url, limits=httpx.Limits(max_connections=8), timeout=60) as local:
        inside = await statuses(local, ["camera-1.secret"] * 310)

    assert (flood.count(405), flood.count(429)) == (301, 9)
    assert other + inside == [405] * 311


async def test_behind_a_load_balancer_the_limits_are_those_of_its_clients(service: Service, tmp_path: Path) -> None:
    """With IPv6, the limits are those of a network, in which one client has as many addresses as it likes."""
    changes = {"rate=300r/s": "rate=1r/m", "# set_real_ip_from 192.0.2.0/24": "set_real_ip_from 127.0.0.1"}
    changes |= {f"# {name}": name for name in ("real_ip_header", "real_ip_recursive")}
    with proxying(service.sockets, tmp_path, changes) as proxy:
        async with clients(proxy) as client:

            async def ask(address: str) -> int:
                return (await client.get("/detect", headers={"X-Forwarded-For": f"192.0.2.7, {address}"})).status_code

            network = await asyncio.gather(*(ask(f"2001:db8:0:5::{number:x}") for number in range(310)))
            whole = await ask("2001:db8:0:5:6:7:8:9")
            others = [await ask(address) for address in ("2001:db8:0:6::1", "192.0.2.1", "192.0.2.2", "::1")]

    assert (network.count(405), network.count(429), whole) == (301, 9, 429)
    assert others == [405] * 4


@asynccontextmanager
async def slow_uploads(proxy: Proxy, address: str, count: int) -> AsyncIterator[None]:
    """Begin that many uploads from one address, and let them wait during a block."""
    port = urlsplit(proxy.url).port
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=proxy.trust, local_addr=(address, 0))
        writers.append(writer)
        writer.write(DETECT + b"Content-Length: 100000\r\n\r\n" + bytes(50_000))
        await writer.drain()
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_slow_clients_do_not_reach_the_gateway(service: Service) -> None:
    workers = [worker for instance in service.fleet.instances() for worker in instance.children()]

    def connections() -> int:
        return sum(len(worker.net_connections("unix")) for worker in workers)

    before = connections()
    async with (
        slow_uploads(service.proxy, "127.0.0.30", 100),
        clients(service.proxy, "127.0.0.30") as one_more,
        clients(service.proxy, "127.0.0.31") as other,
    ):
        rejected = await one_more.get("/models")
        served = await other.post("/detect", content=SCENE)
        during = connections()

    assert problem(429, rejected.headers, rejected.content)["code"] == "rate_limited"
    assert served.status_code == 200
    assert during - before < 10  # those that NGINX keeps


def test_the_units_reload_reaches_the_instances_and_nothing_else(service: Service) -> None:
    """SIGHUP would end a worker. An instance that has just been started gets its name a moment later."""
    pattern = shlex.split(NEREID["ExecReload"][0])[-1]

    def reached() -> list[psutil.Process]:
        family = [service.fleet.process, *service.fleet.process.children(recursive=True)]
        return [one for one in family if re.fullmatch(pattern, one.name())]

    wait_for(lambda: len(reached()) == INSTANCES)
    assert reached() == service.fleet.instances()
