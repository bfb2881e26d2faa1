"""NGINX and HAProxy with the files of `deploy`, in front of two instances of a served gateway."""

import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests import nginx
from tests.faults.exchange import Connection, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import traffic
from tests.faults.models import write
from tests.processes import PATIENCE_SECONDS, has_ended, no_process_left, require_program, wait_for
from tests.support import ROOT

HAPROXY = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
CLIENTS, UPLOADS = 3, 4
ADDRESS = "127.0.0.30"
HEADERS = {"Content-Type": "image/jpeg", "X-Real-IP": "192.0.2.9"}  # which is not believed
TOO_LARGE = 52 * 2**20
"""Bytes, more than the proxies and the gateway accept."""


class Service(NamedTuple):
    fleet: Fleet
    url: str
    log: Path
    """What the proxy says."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two instances that take a few bodies at a time and serve for three seconds after SIGTERM."""
    write(repository := tmp_path_factory.mktemp("models"))
    settings = {"max_uploads": UPLOADS, "drain_delay_seconds": 3, "log_level": "info"}
    with no_process_left(), running_fleet(repository, tmp_path_factory.mktemp("fleet"), settings=settings) as fleet:
        yield fleet


@contextmanager
def haproxying(sockets: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run HAProxy without TLS until the block ends; yield its URL. It writes to `haproxy.log` in the folder."""
    program = require_program("haproxy", "haproxy")
    (port,) = find_free(1)
    text, count = re.subn(r"bind :::443 v4v6 ssl .*", f"bind 127.0.0.1:{port}", HAPROXY.read_text(encoding="utf-8"))
    assert count == 1
    for number, socket in enumerate(sockets, 1):
        shipped = f"unix@/run/nereid/nereid-{number}.sock"
        assert shipped in text
        text = text.replace(shipped, f"unix@{socket}")
    file = folder / "haproxy.cfg"
    file.write_text(text, encoding="utf-8")
    with running([program, "-db", "-f", str(file)], {}, port, "/readyz", folder / "haproxy.log") as server:
        yield server.url


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.client(name)) for name in ("NGINX", "HAProxy")])
def service(request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("proxy")
    if request.param == "NGINX":
        with nginx.proxying([f"unix:{socket}" for socket in fleet.sockets], folder) as proxy:
            yield Service(fleet, proxy.local_url, folder / "nginx.log")
    else:
        with haproxying(fleet.sockets, folder) as url:
            yield Service(fleet, url, folder / "haproxy.log")


@pytest.fixture(autouse=True)
def version(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    (name,) = request.node.get_closest_marker("client").args
    said = subprocess.run([require_program(name.lower(), name.lower()), "-v"], capture_output=True, text=True, check=True)
    record_property("version", re.findall(r"\d+\.\d+\.\d+", said.stdout + said.stderr)[0])


async def test_instance_stops(service: Service) -> None:
    """One of two gateways gets SIGTERM while three clients send pictures: every request is answered."""
    async with traffic(service.url, CLIENTS) as counted:
        await counted.until(100)
        instance = service.fleet.instances()[0]
        instance.terminate()
        while not has_ended(instance):
            await counted.until(counted.requests + 10)
        await counted.until(counted.requests + 100)
    wait_for(service.fleet.is_ready)  # `serve` has started another one

    assert set(counted.statuses) == {200}
    said = service.log.read_text(encoding="utf-8")
    # Only HAProxy checks. Another check may be late on a busy machine, and tells nothing.
    down = re.search(r"Server nereid/(\S+) is DOWN, reason: Layer7 wrong status, code: 503", said)
    assert bool(down) == (service.log.name == "haproxy.log")
    if down:
        later = said[down.end() :].partition(f"Server nereid/{down[1]} is UP")[0]
        assert later.count(f" {down[1]} ") <= CLIENTS < later.count(" nereid-")  # those that it already had


async def test_refusals_reach_clients_through_the_proxy(service: Service) -> None:
    """Bodies that are too large, declared or in chunks, get 413, those of a full gateway 429; the log has the client's address."""
    transport = httpx.AsyncHTTPTransport(local_address=ADDRESS)
    async with httpx.AsyncClient(transport=transport, base_url=service.url, timeout=PATIENCE_SECONDS, headers=HEADERS) as client:
        declared = await client.post("/detect", content=bytes(TOO_LARGE))
        chunked = await client.post("/detect", content=in_chunks())
        async with AsyncExitStack() as uploads:
            for socket in service.fleet.sockets * UPLOADS:
                upload = await uploads.enter_async_context(await Connection.open(f"unix:{socket}"))
                await upload.send(encode(b"....", Content_Type="image/jpeg")[:-1])
            full = await client.post("/detect", content=bytes(3_000_000))

    assert [answer.status_code for answer in (declared, chunked, full)] == [413, 413, 429]
    assert {answer.json()["code"] for answer in (declared, chunked)} == {"body_too_large"}
    assert (full.json()["code"], full.headers["retry-after"]) == ("gateway_full", "1")
    assert service.fleet.log_of(full.headers["x-request-id"])["client"] == ADDRESS


async def in_chunks() -> AsyncIterator[bytes]:
    for _ in range(TOO_LARGE // 2**20):
        yield bytes(2**20)
