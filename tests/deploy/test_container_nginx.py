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
from tests.deploy.compose import GPU
from tests.deploy.containers import READY_SECONDS, USER, Container, Image, first_process, stop, temporary_folder
from tests.deploy.needs import defaults
from tests.networks import bring_up, enter, ip, network
from tests.nginx import SHIPPED, write_certificate
from tests.processes import no_process_left, wait_for
from tests.programs import require_program
from tests.support import json as json_of
from tests.support import sample_image

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]

ADDRESSES: dict[str, str] = GPU["nginx"]["extra_hosts"]
"""By name of the instance."""
PUBLIC, CLIENT = "10.46.2.1", "10.46.2.2"
"""Addresses of NGINX and of the clients in their network, for which Compose has none."""
SEVERAL = 10
"""Answers that show that something goes on."""
PATIENCE_SECONDS = 300.0

# The folders of NGINX replace those of the machine, but only for NGINX.
_MOUNTED = 'set -e; cd "$0"; for folder in etc run var; do mount --bind $folder /$folder; done; exec "$@"'


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
def networks_of_nginx() -> Iterator[Networks]:
    require_program("ip", "iproute2")
    with network(f"nereid-{os.getpid()}-a") as nginx, network(f"nereid-{os.getpid()}-b") as client:
        # As an engine's bridge, it keeps its hardware address when one of its ports is removed.
        ip("-n", nginx, "link", "add", "api", "address", "02:00:00:00:00:01", "type", "bridge")
        bring_up(nginx, "api", GPU["nginx"]["networks"]["api"]["ipv4_address"])
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
        environment = {key.removeprefix(PREFIX).lower(): defaults(value) for key, value in GPU[name]["environment"].items()}
        given = {"workers": 1, "timeout_seconds": 20, "triton_endpoints": self.triton, "triton_metrics_url": ""}
        folder = Path(mkdtemp(dir=self.folder))
        log = folder / "log"
        with self.networks.joined(name) as own:
            container = Container(self.image, temporary_folder(folder / "tmp"), environment | given, network=own)
            with container.running(log) as process:
                wait_for(lambda: process.poll() is not None or container.check_health()[0] == 0, READY_SECONDS)
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


@contextmanager
def running_nginx(network: str, folder: Path, *instances: str) -> Iterator[Nginx]:
    """Run NGINX in a network with the shipped files, which Compose mounts; only the list of instances is changed."""
    program = require_program("nginx", "nginx")
    for part in ("etc/nginx/conf.d", "etc/nereid/tls", "run", "var/lib/nginx", "var/log/nginx"):
        (folder / part).mkdir(parents=True)
    for source in ("/etc/passwd", "/etc/group"):
        shutil.copy(source, folder / "etc")
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
        command = [*entering, program, "-g", "daemon off;"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for((folder / "run/nginx.pid").exists)  # it listens
        yield Nginx(trust, folder / "var/log/nginx/access.log")
    finally:
        end_group(process, PATIENCE_SECONDS)


class Clients(NamedTuple):
    """Clients that send images without pause, one for each, and check each answer."""

    network: str
    trust: ssl.SSLContext
    expected: Mapping[str, Any]
    """Detections by image."""
    is_over: Event
    answers: Counter[str]
    """Right answers by image."""
    wrong: list[str]
    """What came instead of a right answer."""

    @contextmanager
    def sending(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self.expected)) as pool:
            threads = [pool.submit(self._send, image) for image in self.expected]
            try:
                yield
            finally:
                self.is_over.set()
        for thread in threads:
            thread.result()

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more right answers have come, and no wrong one."""
        total = self.answers.total() + count
        self.wait_until(lambda: self.answers.total() >= total)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_for(lambda: self.wrong != [] or condition(), PATIENCE_SECONDS)
        assert self.wrong == []

    def _send(self, image: str) -> None:
        enter(self.network)
        with httpx.Client(base_url=f"https://{PUBLIC}", verify=self.trust, timeout=60) as client:
            while not self.is_over.is_set():
                try:
                    response = client.post("/detect", content=sample_image(image))
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                else:
                    if response.status_code == 200 and response.json()["detections"] == self.expected[image]:
                        self.answers[image] += 1
                    else:
                        self.wrong.append(f"{response.status_code} {response.text}")


async def test_no_request_is_lost_when_a_container_is_killed(
    api: Image, triton_of_containers: str, networks_of_nginx: Networks, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    expected = {}
    for name in ("chelsea.jpg", "coffee.jpg", "astronaut.jpg"):
        found = json_of(await client.post("/detect", content=sample_image(name)))["detections"]
        expected[name] = [pytest.approx(detection, abs=0.001) for detection in found]  # a batch may be added up otherwise
        assert found != []
    instances = Instances(api, networks_of_nginx, triton_of_containers, tmp_path)

    with no_process_left(), instances.running("api-1"), running_nginx(networks_of_nginx.nginx, tmp_path, "api-1", "api-2") as nginx:
        clients = Clients(networks_of_nginx.client, nginx.trust, expected, Event(), Counter(), [])
        with clients.sending():
            with instances.running("api-2") as process:
                clients.wait_until(lambda: nginx.answered_by("api-2") >= SEVERAL)
                for part in psutil.Process(process.pid).children(recursive=True):
                    part.suspend()
                clients.wait_for_answers(2 * len(expected))  # meanwhile NGINX sends it a request
                first_process(process).kill()
                process.wait()
            clients.wait_for_answers(SEVERAL)
            before = nginx.answered_by("api-2")
            with instances.running("api-2"):
                clients.wait_until(lambda: nginx.answered_by("api-2") >= before + SEVERAL)
            clients.wait_for_answers(SEVERAL)

    repeated = [one for one in nginx.requests() if one.upstream == f"{ADDRESSES['api-2']}:4603, {ADDRESSES['api-1']}:4603"]
    assert clients.wrong == []
    assert {one.upstream_status for one in repeated if not one.upstream_connect_seconds.startswith("-")} == {"502, 200"}
    assert "504, 200" in {one.upstream_status for one in repeated if one.upstream_connect_seconds.startswith("-")}
    assert len(nginx.requests()) == sum(clients.answers.values())
    assert not [path for path in SHM.glob("nereid-[0-9]*") if path.stat().st_uid == USER]
