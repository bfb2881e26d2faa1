"""Containers of the API behind NGINX, joined as `deploy/compose.yaml` says: one of two is killed while clients send images."""

import os
import re
import shutil
import ssl
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from tempfile import mkdtemp
from threading import Event
from typing import Any, NamedTuple

import httpx
import msgspec
import psutil
import pytest

from app.host.processes import end_group
from app.settings.schema import PREFIX
from app.triton.shared_memory import SHM
from tests.deploy.containers import READY_SECONDS, USER, Container, Image, first_process, stop, temporary_folder
from tests.deploy.needs import DEPLOY, defaults, load
from tests.networks import bring_up, enter, ip, network
from tests.nginx import SHIPPED, write_certificate
from tests.processes import no_process_left, wait_for
from tests.programs import require_program
from tests.support import json as json_of
from tests.support import sample_image

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]

SERVICES = load(DEPLOY / "compose.yaml")["services"]
ADDRESSES: dict[str, str] = SERVICES["nginx"]["extra_hosts"]
"""By name of the instance."""
NGINX: str = SERVICES["nginx"]["networks"]["api"]["ipv4_address"]
PUBLIC, CLIENT = "10.46.2.1", "10.46.2.2"
"""Addresses of NGINX and of the clients in their network, for which Compose has none."""
IMAGES = ("chelsea.jpg", "coffee.jpg", "astronaut.jpg")
"""One for each client."""
SEVERAL = 10
"""Answers that show that something goes on."""
PATIENCE_SECONDS = 300.0

# The folders of NGINX replace those of the machine, but only for NGINX.
_MOUNTED = """
set -e
cd "$0"
for folder in etc run var; do mount --bind $folder /$folder; done
exec "$@"
"""


class Networks(NamedTuple):
    """That of NGINX and the instances, with the addresses of Compose, and that of NGINX and the clients."""

    nginx: str
    client: str

    @contextmanager
    def joined(self, name: str) -> Iterator[str]:
        """Join an instance to NGINX; afterwards nothing is at its address, as when an engine has ended a container."""
        hardware = f"02:42:{IPv4Address(ADDRESSES[name]).packed.hex(':')}"  # derived as Docker does, and so the same again
        with network(f"{self.nginx}-{name}") as own:
            ip("-n", own, "link", "add", "eth0", "address", hardware, "type", "veth", "peer", "name", name, "netns", self.nginx)
            ip("-n", self.nginx, "link", "set", name, "master", "api", "up")
            bring_up(own, "eth0", ADDRESSES[name])
            yield own


@pytest.fixture
def namespaces() -> Iterator[Networks]:
    require_program("ip", "iproute2")
    with network(f"nereid-{os.getpid()}-a") as nginx, network(f"nereid-{os.getpid()}-b") as client:
        # As an engine's bridge, it keeps its hardware address when one of its ports is removed.
        ip("-n", nginx, "link", "add", "api", "address", "02:00:00:00:00:01", "type", "bridge")
        bring_up(nginx, "api", NGINX)
        ip("-n", client, "link", "add", "edge", "type", "veth", "peer", "name", "edge", "netns", nginx)
        bring_up(nginx, "edge", PUBLIC)
        bring_up(client, "edge", CLIENT)
        yield Networks(nginx, client)


class Instances(NamedTuple):
    """How to run the containers of Compose's instances."""

    image: Image
    networks: Networks
    triton: str
    """Its address."""
    folder: Path

    @contextmanager
    def running(self, name: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a container until the block ends; it is healthy when the block begins.

        Its settings are those of Compose but for the address of Triton, and for limits that a slow machine does not reach.
        """
        environment = {key.removeprefix(PREFIX).lower(): defaults(value) for key, value in SERVICES[name]["environment"].items()}
        given = {"workers": 1, "timeout_seconds": 20, "triton_endpoints": self.triton, "triton_metrics_url": ""}
        folder = Path(mkdtemp(dir=self.folder))
        log = folder / "log"
        with self.networks.joined(name) as own:
            container = Container(self.image, temporary_folder(folder / "tmp"), environment | given, network=own)
            with container.running(log) as process:
                wait_for(
                    lambda: process.poll() is not None or container.run(*self.image.health_check).returncode == 0, READY_SECONDS
                )
                assert process.poll() is None, log.read_text(encoding="utf-8")
                yield process
                assert process.poll() is not None or stop(process) == 0, log.read_text(encoding="utf-8")


class Request(msgspec.Struct):
    """A request in NGINX's log, with what it says of each instance that got it, separated by `, `."""

    upstream: str
    upstream_status: str
    upstream_connect_seconds: str


class Nginx(NamedTuple):
    trust: ssl.SSLContext
    """Trusts its certificate."""
    log: Path

    def requests(self) -> list[Request]:
        """Return what it has logged; the last line may not be complete yet."""
        return [msgspec.json.decode(line, type=Request) for line in self.log.read_bytes().split(b"\n")[:-1]]

    def answered_by(self, name: str) -> int:
        """Return how many requests an instance answered that no other one got."""
        return sum(request.upstream == f"{ADDRESSES[name]}:4603" for request in self.requests())

    def repeated(self, upstream: str, *, connected: bool) -> list[Request]:
        """Return the requests that these instances got one after the other, with or without a connection to the first."""
        requests = [request for request in self.requests() if request.upstream == upstream]
        return [request for request in requests if request.upstream_connect_seconds.startswith("-") != connected]


@contextmanager
def running_nginx(network: str, folder: Path, *instances: str) -> Iterator[Nginx]:
    """Run NGINX in a network with the shipped files, which Compose mounts; only the list of instances is changed."""
    program = require_program("nginx", "nginx")
    for part in ("etc/nginx/conf.d", "etc/nereid/tls", "run", "var/lib/nginx", "var/log/nginx"):
        (folder / part).mkdir(parents=True)
    for source in ("passwd", "group"):
        shutil.copy(Path("/etc", source), folder / "etc")
    hosts = "".join(f"{ADDRESSES[name]} {name}\n" for name in instances)
    (folder / "etc/hosts").write_text(hosts, encoding="utf-8")
    shutil.copy(SHIPPED / "nginx.conf", folder / "etc/nginx")
    shutil.copy(SHIPPED / "nereid.conf", folder / "etc/nginx/conf.d")
    upstream = (SHIPPED / "upstream.compose.conf").read_text(encoding="utf-8")
    left_out = "|".join(ADDRESSES.keys() - set(instances))
    (folder / "etc/nginx/conf.d/upstream.conf").write_text(re.sub(f" *server ({left_out}):.*\n", "", upstream), encoding="utf-8")
    trust = write_certificate(folder / "etc/nereid/tls", PUBLIC)

    entering = ["nsenter", f"--net=/run/netns/{network}", "unshare", "--mount", "sh", "-c", _MOUNTED, str(folder)]
    with (folder / "nginx.log").open("wb") as output:
        process = subprocess.Popen(
            [*entering, program, "-g", "daemon off;"], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for((folder / "run/nginx.pid").exists)  # it listens
        yield Nginx(trust, folder / "var/log/nginx/access.log")
    finally:
        end_group(process, PATIENCE_SECONDS)


class Clients:
    """Clients that send images without pause, and check each answer."""

    def __init__(self, network: str, trust: ssl.SSLContext, expected: Mapping[str, Any]) -> None:
        """Prepare one client for each image, whose detections are known."""
        self._network = network
        self._trust = trust
        self._expected = expected
        self._is_over = Event()
        self.answers: Counter[str] = Counter()
        """Right answers by image."""
        self.wrong: list[str] = []
        """What came instead of a right answer."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self._expected)) as pool:
            threads = [pool.submit(self._send, image) for image in self._expected]
            try:
                yield
            finally:
                self._is_over.set()
        for thread in threads:
            thread.result()

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more right answers have come, and no wrong one."""
        wanted = self.answers.total() + count
        self.wait_until(lambda: self.answers.total() >= wanted)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while no answer is wrong."""
        wait_for(lambda: self.wrong != [] or condition(), PATIENCE_SECONDS)
        assert self.wrong == []

    def _send(self, image: str) -> None:
        enter(self._network)
        with httpx.Client(base_url=f"https://{PUBLIC}", verify=self._trust, timeout=60) as client:
            while not self._is_over.is_set():
                try:
                    response = client.post("/detect", content=sample_image(image))
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                else:
                    if response.status_code == 200 and response.json()["detections"] == self._expected[image]:
                        self.answers[image] += 1
                    else:
                        self.wrong.append(f"{response.status_code} {response.text}")


async def test_no_request_is_lost_when_a_container_is_killed(
    api: Image, triton_of_containers: str, namespaces: Networks, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    expected = {}
    for name in IMAGES:
        found = json_of(await client.post("/detect", content=sample_image(name)))["detections"]
        expected[name] = [pytest.approx(detection, abs=0.001) for detection in found]  # a batch may be added up otherwise
        assert found != []
    instances = Instances(api, namespaces, triton_of_containers, tmp_path)

    with no_process_left(), instances.running("api-1"), running_nginx(namespaces.nginx, tmp_path, "api-1", "api-2") as nginx:
        clients = Clients(namespaces.client, nginx.trust, expected)
        with clients.sending():
            with instances.running("api-2") as process:
                clients.wait_until(lambda: nginx.answered_by("api-2") >= SEVERAL)
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.suspend()
                clients.wait_for_answers(2 * len(IMAGES))  # meanwhile NGINX sends it a request
                first_process(process).kill()
                process.wait()
            clients.wait_for_answers(SEVERAL)
            before = nginx.answered_by("api-2")
            with instances.running("api-2"):
                clients.wait_until(lambda: nginx.answered_by("api-2") >= before + SEVERAL)
            clients.wait_for_answers(SEVERAL)

    repeated = f"{ADDRESSES['api-2']}:4603, {ADDRESSES['api-1']}:4603"
    assert clients.wrong == []
    assert {request.upstream_status for request in nginx.repeated(repeated, connected=True)} == {"502, 200"}
    assert "504, 200" in {request.upstream_status for request in nginx.repeated(repeated, connected=False)}
    assert len(nginx.requests()) == sum(clients.answers.values())
    assert not [path for path in SHM.glob("nereid-[0-9]*") if path.stat().st_uid == USER]
