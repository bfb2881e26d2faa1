"""NGINX with the shipped files in front of three real instances: routes, TLS, errors, addresses, logs and limits."""

import asyncio
import json
import re
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from app.api.answering.schema import Problem
from app.settings.schema import Settings
from tests.deploy.needs import NEREID
from tests.faults.fleet import Fleet, running_fleet
from tests.nginx import Proxy, proxying
from tests.processes import no_process_left, wait_for
from tests.support import SCENE, finds
from tests.support import json as json_of

pytestmark = pytest.mark.system

INSTANCES = 3
LONG = "x" * 9000
CHUNKS = (b"100000\r\n" + bytes(2**20) + b"\r\n") * 51


class Service(NamedTuple):
    proxy: Proxy
    fleet: Fleet

    @property
    def sockets(self) -> list[str]:
        return [f"unix:{socket}" for socket in self.fleet.sockets]


@pytest.fixture(scope="module")
def service(served: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "proxy").mkdir()
    given = {"triton_endpoints": served.triton_address, "model": "six_columns", "log_level": "info"}
    with (
        no_process_left(),
        running_fleet(Path(served.model_repository), folder, instances=INSTANCES, settings=given) as fleet,
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


def exchange(proxy: Proxy, head: str, body: bytes = b"", url: str = "") -> tuple[int, dict[str, str], bytes]:
    """Send a request to the public listener, or to another one, and receive the answer."""
    parts = urlsplit(url or proxy.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=30) as bare:
        connection = proxy.trust.wrap_socket(bare, server_hostname="localhost") if parts.scheme == "https" else bare
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        with connection, connection.makefile("rb") as received:
            status = int(received.readline().split()[1])
            lines = iter(lambda: received.readline().decode("latin-1").rstrip(), "")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return status, headers, received.read(int(headers["content-length"]))


def assert_problem(answer: tuple[int, dict[str, str], bytes], status: int, code: str) -> None:
    """Check that an answer of NGINX itself has the shape of the gateway's errors."""
    found = json.loads(answer[2])
    headers = answer[1]
    assert (answer[0], found["code"], found["status"], found["type"]) == (status, code, status, f"urn:nereid:problem:{code}")
    assert list(found) == list(Problem.__struct_fields__)
    assert (headers["content-type"], headers["server"]) == ("application/problem+json", "nginx")
    assert found["request_id"] == headers["x-request-id"]
    assert "x-process-time" not in headers


def get(path: str, method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: nereid"


async def test_images_and_batches_are_detected(client: httpx.AsyncClient) -> None:
    """The response to a batch may be larger than an image; its lines come one by one."""
    async with asyncio.timeout(60):
        assert await finds(client)
    for path in ("/detect", "/v1/detect"):
        assert [found["class_name"] for found in json_of(await client.post(path, content=SCENE))["detections"]] == ["red", "blue"]
    assert json_of(await client.get("/v1/models"))["default"] == "six_columns"
    files = [("images", ("scene.bmp", SCENE))] * 2 + [("images", ("junk.bin", bytes(30 * 2**20)))] * 2
    response = await client.post("/detect/batch", files=files, headers={"Accept": "application/x-ndjson"})
    statuses = [json.loads(line).get("status") for line in response.content.splitlines()]
    assert sorted(statuses[:-1]) == [200, 200, 415, 415]
    assert "x-accel-buffering" not in response.headers  # NGINX has obeyed it


async def test_page_is_for_everybody_and_private_paths_are_for_this_machine(service: Service, client: httpx.AsyncClient) -> None:
    page = await client.get("/", headers={"Accept": "text/html"})
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert (await client.get("/page-assets/page.js")).headers["content-type"].startswith("text/javascript")
    async with httpx.AsyncClient(base_url=service.proxy.local_url, timeout=60) as local:
        for path in ("/health", "/metrics", "/docs", "/docs-assets/swagger_style.css", "/v1/metrics"):
            assert_problem(exchange(service.proxy, get(path)), 404, "not_found")
            assert (await local.get(path)).status_code == 200


REFUSED = {
    **dict.fromkeys(map(get, ("/problem", "//metrics", "/%6detrics", "/v1//metrics", "/METRICS")), (404, "not_found")),
    **dict.fromkeys(map(get, ("/detect/../metrics", "/predict/x%2f..%2f..%2fmetrics")), (404, "not_found")),
    "NONSENSE": (400, "malformed_request"),
    "GET /detect HTTP/1.1": (400, "malformed_request"),
    get("/detect", "TRACE"): (405, "method_not_allowed"),
    f"{get('/detect', 'POST')}\r\nContent-Length: 52428801": (413, "body_too_large"),
    f"{get('/detect', 'POST')}\r\nTransfer-Encoding: chunked": (413, "body_too_large"),
    f"{get('/detect/batch', 'POST')}\r\nContent-Length: {2**27 + 1}": (413, "body_too_large"),
    get(f"/{LONG}"): (414, "uri_too_long"),
    f"{get('/detect')}\r\nX: {LONG}": (431, "header_too_large"),
    f"{get('/detect', 'POST')}\r\nTransfer-Encoding: gzip": (501, "not_implemented"),
    "GET /detect HTTP/3.0\r\nHost: nereid": (505, "http_version_not_supported"),
}


def test_errors_of_nginx_look_like_those_of_the_gateway(service: Service) -> None:
    for head, expected in REFUSED.items():
        assert_problem(exchange(service.proxy, head, CHUNKS if head.endswith("chunked") else b""), *expected)


def test_path_that_is_cleaned_up_reaches_no_other_route(service: Service) -> None:
    """NGINX decides by the path without dots, and passes on what it was sent: it is the gateway that does not know it."""
    status, headers, _ = exchange(service.proxy, get("/metrics/../detect"))

    assert (status, "x-process-time" in headers) == (404, True)


def test_plain_http_is_redirected_and_refused_on_the_port_for_tls(service: Service) -> None:
    """A key that was sent there has been seen by others: it is no redirect that would hide it."""
    status, headers, _ = exchange(service.proxy, get("/detect?confidence=0.4", "POST"), url=service.proxy.plain_url)

    assert (status, headers["location"]) == (308, "https://nereid/detect?confidence=0.4")
    assert_problem(exchange(service.proxy, get("/livez"), url=service.proxy.url.replace("https", "http")), 400, "malformed_request")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_old_tls_is_refused(service: Service) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2", "http/1.1"])
    port = urlsplit(service.proxy.url).port
    for version in ("TLSv1_2", "TLSv1_3", "TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        refusal = pytest.raises(ssl.SSLError) if version == "TLSv1_1" else nullcontext()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as bare, refusal, context.wrap_socket(bare) as connection:
            assert connection.selected_alpn_protocol() == "h2"


async def test_request_id_and_address_of_the_client_are_in_both_logs(service: Service) -> None:
    """The gateway trusts NGINX, and NGINX trusts nobody."""
    for given, is_kept in (("camera-1.42", True), ("x" * 65, False), ('"}, {', False)):
        headers = {"X-Real-IP": "192.0.2.1", "X-Forwarded-For": "192.0.2.2", "X-Request-ID": given}
        async with clients(service.proxy, "127.0.0.9", headers=headers) as client:
            used = (await client.get("/models")).headers["x-request-id"]
        assert (used == given) == is_kept
        logged = service.fleet.log_of(used)
        assert (logged["path"], logged["client"]) == ("/models", "127.0.0.9")
        wait_for(lambda used=used: any(line["request_id"] == used for line in service.proxy.log_lines()))  # type: ignore[misc]


async def test_log_of_nginx_has_ids_of_keys_and_no_secret(service: Service, client: httpx.AsyncClient) -> None:
    keys = {"camera-1": ("Authorization", "bearer camera-1.canary"), "": ("Authorization", "Basic Y2FuYXJ5.canary")}
    keys["camera-2"] = "X-API-Key", "camera-2.canary"
    for name, (header, key) in keys.items():
        await client.get("/models?canary-query", headers={"X-Request-ID": f"by-{name}", header: key})
    wait_for(lambda: {f"by-{name}" for name in keys} <= {line["request_id"] for line in service.proxy.log_lines()})
    lines = {line["request_id"]: line for line in service.proxy.log_lines()}

    assert "canary" not in (service.proxy.folder / "access.log").read_text(encoding="utf-8")
    assert [lines[f"by-{name}"]["key"] for name in keys] == [*keys]
    line = lines["by-camera-1"]
    assert (line["request"], line["status"], line["upstream_status"]) == ("GET /models", "200", "200")
    assert line["upstream"] in service.sockets


async def statuses(client: httpx.AsyncClient, keys: list[str]) -> tuple[int, int]:
    """Ask for nothing that costs much with each of these keys; return how many were answered, and how many refused."""
    answers = await asyncio.gather(*(client.get("/detect", headers={"X-API-Key": key}) for key in keys))
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in refused:
        assert_problem((429, dict(answer.headers), answer.content), 429, "rate_limited")
        assert answer.headers["retry-after"] == "1"
    return sum(answer.status_code == 405 for answer in answers), len(refused)


SLOW = {"rate=200r/s": "rate=1r/m", "rate=300r/s": "rate=1r/m"}
"""Limits that let through the shipped bursts, and hardly anything after them."""


async def test_each_key_and_each_address_has_a_limit_of_its_own(service: Service, tmp_path: Path) -> None:
    """A stranger who knows only the id of a key does not use the limit up."""
    with proxying(service.sockets, tmp_path, SLOW) as proxy:
        async with clients(proxy, "127.0.0.11") as first, clients(proxy, "127.0.0.12") as second:
            assert await statuses(first, ["camera-1.guess-guess"] * 210) == (201, 9)
            assert await statuses(second, ["camera-1.secret-secret"] * 150) == (150, 0)
            assert await statuses(first, ["camera-1.secret-secret"] * 60) == (51, 9)
            for start in ("Authorization: Bearer ", "authorization: bearer\t", "X-API-Key:", "X-API-Key: \t"):
                assert exchange(proxy, f"{get('/detect')}\r\n{start}camera-1.secret-secret")[0] == 429
            assert await statuses(first, ["camera-2.secret-secret"] * 20) == (20, 0)
        keys = [f"key-{number}.secret" for number in range(310)]
        async with clients(proxy, "127.0.0.21") as first, clients(proxy, "127.0.0.22") as second:
            assert await statuses(first, keys) == (301, 9)
            assert await statuses(second, keys[:1]) == (1, 0)
        async with httpx.AsyncClient(base_url=proxy.local_url, limits=httpx.Limits(max_connections=8), timeout=60) as local:
            assert await statuses(local, ["camera-1.secret"] * 310) == (310, 0)


async def test_behind_a_load_balancer_the_limits_are_those_of_its_clients(service: Service, tmp_path: Path) -> None:
    """With IPv6, the limits are those of a network, in which one client has as many addresses as it likes."""
    changes = SLOW | {"# set_real_ip_from 192.0.2.0/24": "set_real_ip_from 127.0.0.1"}
    changes |= {f"# {name}": name for name in ("real_ip_header", "real_ip_recursive")}
    with proxying(service.sockets, tmp_path, changes) as proxy:
        async with clients(proxy) as client:

            async def ask(address: str) -> int:
                return (await client.get("/detect", headers={"X-Forwarded-For": f"192.0.2.7, {address}"})).status_code

            network = await asyncio.gather(*(ask(f"2001:db8:0:5::{number:x}") for number in range(310)))
            others = [await ask(address) for address in ("2001:db8:0:5:6:7:8:9", "2001:db8:0:6::1", "192.0.2.1", "::1")]

    assert (network.count(405), network.count(429), others) == (301, 9, [429, 405, 405, 405])


def test_reload_of_the_unit_reaches_the_instances_and_nothing_else(service: Service) -> None:
    """SIGHUP would end a worker. An instance that has just been started gets its name a moment later."""
    pattern = shlex.split(NEREID["ExecReload"][0])[-1]

    def reached() -> list[psutil.Process]:
        family = [service.fleet.process, *service.fleet.process.children(recursive=True)]
        return [process for process in family if re.fullmatch(pattern, process.name())]

    wait_for(lambda: reached() == service.fleet.instances())
    assert len(reached()) == INSTANCES
