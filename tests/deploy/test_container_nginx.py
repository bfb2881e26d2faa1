"""Containers of the API behind NGINX, joined as `deploy/compose.yaml` says: one of two is killed while clients send images."""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from ssl import SSLContext
from tempfile import mkdtemp
from threading import Event
from typing import Any

import httpx
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

ADDRESSES: dict[str, str] = GPU["nginx"]["extra_hosts"]
"""By name of the instance."""
PUBLIC, CLIENT = "10.46.2.1", "10.46.2.2"
"""Addresses of NGINX and of the clients in their network, for which Compose has none."""
INSTANCES = ("api-1", "api-2")
SEVERAL = 10
"""Answers that show that something goes on."""
PATIENCE_SECONDS = 300.0

# The folders of NGINX replace those of the machine, but only for NGINX.
_MOUNTED = 'set -e; cd "$0"; for folder in etc run var; do mount --bind $folder /$folder; done; exec "$@"'


@contextmanager
def networks_of_nginx() -> Iterator[tuple[str, str]]:
    """Have the network of NGINX and the instances, with the addresses of Compose, and that of the clients, which leads to NGINX."""
    require_program("ip", "iproute2")
    with network(f"nereid-{os.getpid()}-a") as nginx, network(f"nereid-{os.getpid()}-b") as client:
        # As an engine's bridge, it keeps its hardware address when one of its ports is removed.
        ip("-n", nginx, "link", "add", "api", "address", "02:00:00:00:00:01", "type", "bridge")
        bring_up(nginx, "api", GPU["nginx"]["networks"]["api"]["ipv4_address"])
        ip("-n", client, "link", "add", "edge", "type", "veth", "peer", "name", "edge", "netns", nginx)
        bring_up(nginx, "edge", PUBLIC)
        bring_up(client, "edge", CLIENT)
        yield nginx, client


@contextmanager
def running_instance(name: str, image: Image, nginx: str, triton: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a container in NGINX's network until the block ends; it is healthy when the block begins.

    Its settings are those of Compose but for the address of Triton, and for limits that a slow machine does not reach. Afterwards
    nothing is at its address, as when an engine has ended a container.
    """
    environment = {key.removeprefix(PREFIX).lower(): defaults(value) for key, value in GPU[name]["environment"].items()}
    given = {"workers": 1, "timeout_seconds": 20, "triton_endpoints": triton, "triton_metrics_url": ""}
    hardware = f"02:42:{IPv4Address(ADDRESSES[name]).packed.hex(':')}"  # derived as Docker does, and so the same again
    own_folder = Path(mkdtemp(dir=folder))
    log = own_folder / "log"
    with network(f"{nginx}-{name}") as own:
        ip("-n", own, "link", "add", "eth0", "address", hardware, "type", "veth", "peer", "name", name, "netns", nginx)
        ip("-n", nginx, "link", "set", name, "master", "api", "up")
        bring_up(own, "eth0", ADDRESSES[name])
        container = Container(image, temporary_folder(own_folder / "tmp"), environment | given, network=own)
        with container.running(log) as process:
            wait_for(lambda: process.poll() is not None or container.check_health()[0] == 0, READY_SECONDS)
            assert process.poll() is None, log.read_text(encoding="utf-8")
            yield process
            assert process.poll() is not None or stop(process) == 0, log.read_text(encoding="utf-8")


@contextmanager
def running_nginx(network: str, folder: Path) -> Iterator[SSLContext]:
    """Run NGINX in a network with the shipped files, which Compose mounts; only the list of instances is changed.

    Yields:
        What trusts its certificate.
    """
    program = require_program("nginx", "nginx")
    for part in ("etc/nginx/conf.d", "etc/nereid/tls", "run", "var/lib/nginx", "var/log/nginx"):
        (folder / part).mkdir(parents=True)
    for source in ("/etc/passwd", "/etc/group"):
        shutil.copy(source, folder / "etc")
    (folder / "etc/hosts").write_text("".join(f"{ADDRESSES[name]} {name}\n" for name in INSTANCES), encoding="utf-8")
    shutil.copy(SHIPPED / "nginx.conf", folder / "etc/nginx")
    shutil.copy(SHIPPED / "nereid.conf", folder / "etc/nginx/conf.d")
    upstream, left_out = (SHIPPED / "upstream.compose.conf").read_text(encoding="utf-8"), "|".join(ADDRESSES.keys() - {*INSTANCES})
    (folder / "etc/nginx/conf.d/upstream.conf").write_text(re.sub(f" *server ({left_out}):.*\n", "", upstream), encoding="utf-8")
    trust = write_certificate(folder / "etc/nereid/tls", PUBLIC)
    entering = ["nsenter", f"--net=/run/netns/{network}", "unshare", "--mount", "sh", "-c", _MOUNTED, str(folder)]
    with (folder / "nginx.log").open("wb") as output:
        command = [*entering, program, "-g", "daemon off;"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for((folder / "run/nginx.pid").exists)  # it listens
        yield trust
    finally:
        end_group(process, PATIENCE_SECONDS)


class Clients:
    """Clients that send images without pause, one for each whose detections are known, and check each answer."""

    def __init__(self, network: str, trust: SSLContext, expected: dict[str, Any]) -> None:
        self._network, self._trust, self._expected, self._is_over = network, trust, expected, Event()
        self.right = Counter[str]()
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

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_for(lambda: self.wrong != [] or condition(), PATIENCE_SECONDS)
        assert self.wrong == []

    def wait_for_answers(self, count: int) -> None:
        total = self.right.total() + count
        self.wait_until(lambda: self.right.total() >= total)

    def _send(self, image: str) -> None:
        enter(self._network)
        with httpx.Client(base_url=f"https://{PUBLIC}", verify=self._trust, timeout=60) as client:
            while not self._is_over.is_set():
                try:
                    response = client.post("/detect", content=sample_image(image))
                    if response.status_code == 200 and response.json()["detections"] == self._expected[image]:
                        self.right[image] += 1
                    else:
                        self.wrong.append(f"{response.status_code} {response.text}")
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))


@pytest.mark.packages
@pytest.mark.timeout(1800)
async def test_no_request_is_lost_when_a_container_is_killed(
    api: Image, triton_of_containers: str, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    expected = {}
    for name in ("chelsea.jpg", "coffee.jpg", "astronaut.jpg"):
        found = json_of(await client.post("/detect", content=sample_image(name)))["detections"]
        expected[name] = [pytest.approx(detection, abs=0.001) for detection in found]  # a batch may be added up otherwise
        assert found != []
    first, second = (f"{ADDRESSES[name]}:4603" for name in INSTANCES)
    log = tmp_path / "var/log/nginx/access.log"

    def logged(upstream: str) -> list[dict[str, str]]:
        """Return the requests that got to these instances; the last line may not be complete yet."""
        lines = map(json.loads, log.read_bytes().split(b"\n")[:-1])
        return [line for line in lines if line["upstream"] == upstream]

    with no_process_left(), networks_of_nginx() as (inside, outside):
        others = (api, inside, triton_of_containers, tmp_path)
        with running_instance("api-1", *others), running_nginx(inside, tmp_path) as trust:
            clients = Clients(outside, trust, expected)
            with clients.sending():
                with running_instance("api-2", *others) as process:
                    clients.wait_until(lambda: len(logged(second)) >= SEVERAL)
                    for part in psutil.Process(process.pid).children(recursive=True):
                        part.suspend()
                    clients.wait_for_answers(2 * len(expected))  # meanwhile NGINX sends it a request
                    first_process(process).kill()
                    process.wait()
                clients.wait_for_answers(SEVERAL)
                before = len(logged(second))
                with running_instance("api-2", *others):
                    clients.wait_until(lambda: len(logged(second)) >= before + SEVERAL)
                clients.wait_for_answers(SEVERAL)

    repeated = logged(f"{second}, {first}")
    is_connected = [not one["upstream_connect_seconds"].startswith("-") for one in repeated]
    assert clients.wrong == []
    assert {one["upstream_status"] for one, is_one in zip(repeated, is_connected, strict=True) if is_one} == {"502, 200"}
    assert "504, 200" in {one["upstream_status"] for one, is_one in zip(repeated, is_connected, strict=True) if not is_one}
    assert len(log.read_bytes().splitlines()) == clients.right.total()
    assert not [path for path in SHM.glob("nereid-[0-9]*") if path.stat().st_uid == USER]
