"""The bench loads a service on other hosts: client, NGINX and gateway in networks of their own, a millisecond apart."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from app.api.caller import keys
from app.host.http import get_status
from app.host.processes import end_group
from app.settings.schema import PREFIX
from bench.harness.environments import LOCUST
from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import link_installation
from bench.models.repository import write_fixture
from bench.report.records import load_record
from tests.cable import delayed_cable
from tests.networks import enter, network
from tests.nginx import Proxy, prepare, write_certificate
from tests.processes import no_process_left, wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
        reason="networks of their own need root, and ip from iproute2",
    ),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="there is no /dev/net/tun"),
]

DELAY_SECONDS = 0.001
CLIENT, NGINX, NGINX_BEHIND, GATEWAY = "192.0.2.1", "192.0.2.2", "198.51.100.1", "198.51.100.2"
PORT = 4603
URL = f"https://{NGINX}"
MODEL = "null"
_STOP_SECONDS = 30.0


class Deployment(NamedTuple):
    """A service, and a client that can reach it."""

    client: str
    """The client's network."""
    proxy: Proxy

    @property
    def folder(self) -> Path:
        return self.proxy.folder

    def bench(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """Run the bench in the client's network, without a terminal."""
        command = [sys.executable, "-m", "bench", *map(str, arguments)]
        return subprocess.run(
            ["ip", "netns", "exec", self.client, *command],
            cwd=ROOT,
            env=environment_of(ROOT),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def log_lines(self) -> list[dict[str, Any]]:
        """Return NGINX's log of requests from the client's network."""
        return [line for line in self.proxy.log_lines() if line["client"] == CLIENT]

    @property
    def trust(self) -> Sequence[object]:
        return "--ca", self.folder / "ca.crt", "--image", self.folder / "image.jpg", "--yes"

    @property
    def access(self) -> Sequence[object]:
        return "--key-file", self.folder / "key", *self.trust


@contextmanager
def running_in(network: str, command: Sequence[str], url: str, folder: Path, environment: Mapping[str, object]) -> Iterator[None]:
    """Run a server in a network until the block ends; a URL in this network has status 200 when it is ready."""

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return thread.submit(get_status, url, 1).result() == 200

    log = folder / f"{Path(command[0]).name}.log"
    with ThreadPoolExecutor(1) as thread, log.open("wb") as output:
        thread.submit(enter, network).result()
        process = subprocess.Popen(
            ["ip", "netns", "exec", network, *command],
            cwd=folder,
            env={**environment_of(ROOT), **{f"{PREFIX}{name.upper()}": str(value) for name, value in environment.items()}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(is_ready)
            yield
        finally:
            end_group(process, _STOP_SECONDS)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    credential, table = keys.create("bench")
    (folder / "key").write_text(credential, encoding="ascii")
    (folder / "keys.toml").write_text(table, encoding="utf-8")
    Image.new("RGB", (320, 240)).save(folder / "image.jpg")
    write_fixture(MODEL, folder / "models")
    (folder / "triton").mkdir()
    link_installation(folder / "triton")
    settings = {
        "host": GATEWAY,
        "port": PORT,
        "workers": 1,
        "api_keys_file": folder / "keys.toml",
        "trusted_proxies": NGINX_BEHIND,
        "triton_home": folder / "triton",
        "model_repository": folder / "models",
        "model": MODEL,
    }
    # These ports are free in a network of its own.
    proxy = prepare([f"{GATEWAY}:{PORT}"], folder, {name: name for name in ("listen 80 ", "listen 443 ", "4603")})
    write_certificate(folder, NGINX)
    client, middle, far = (f"nereid-{os.getpid()}-{name}" for name in ("client", "nginx", "gateway"))
    with ExitStack() as stack:
        stack.enter_context(no_process_left())
        for name in (client, middle, far):
            stack.enter_context(network(name))
        stack.enter_context(delayed_cable("front", {client: CLIENT, middle: NGINX}, DELAY_SECONDS))
        stack.enter_context(delayed_cable("back", {middle: NGINX_BEHIND, far: GATEWAY}, DELAY_SECONDS))
        serve = [sys.executable, "-m", "app", "serve"]
        stack.enter_context(running_in(far, serve, f"http://{GATEWAY}:{PORT}/readyz", folder, settings))
        stack.enter_context(running_in(middle, proxy.command, f"http://127.0.0.1:{PORT}/readyz", folder, {}))
        yield Deployment(client, proxy)


@pytest.mark.parametrize("mode", [["quick"], ["full", "--clients", "2"]], ids=lambda mode: mode[0])
def test_a_service_behind_nginx_is_measured(deployment: Deployment, mode: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = deployment.bench(*mode, "--url", URL, *deployment.access, "--requests", 40, "--json", file)
    assert done.returncode == 0, done.stderr
    record = load_record(file)
    outcome = record.runs[0].outcome

    assert outcome.statuses == {"200": 40}
    assert outcome.mean - outcome.stages["total"] > 4e3 * DELAY_SECONDS
    assert f"{NGINX} ({NGINX}), another machine" in done.stdout
    for part in ("requests/s", "p50", "p90", "p95", "p99", "200: 40", "infer"):
        assert part in done.stdout
    line = deployment.log_lines()[-1]
    assert (line["client"], line["key"], line["protocol"], line["tls"]) == (CLIENT, "bench", "HTTP/1.1", "TLSv1.3")


def test_without_a_key_nothing_is_measured(deployment: Deployment) -> None:
    done = deployment.bench("quick", "--url", URL, *deployment.trust, "--requests", 20)

    assert done.returncode == 1
    assert f"{URL}/detect accepts no request: 401: " in done.stderr


def test_the_port_without_tls_redirects(deployment: Deployment) -> None:
    done = deployment.bench("quick", "--url", f"http://{NGINX}", *deployment.trust)

    assert done.returncode == 1
    assert done.stderr == f"http://{NGINX}/detect answers with a redirect (308); give the URL to which it leads\n"


@pytest.mark.skipif(not LOCUST.is_installed(), reason=LOCUST.missing)
def test_locust_measures_a_service_behind_nginx(deployment: Deployment) -> None:
    given = "--tasks", "detect", "--clients", 2, "--requests", 20
    done = deployment.bench("locust", "--url", f"{URL}/", *deployment.access, *given)
    refused = deployment.bench("locust", "--url", URL, *deployment.access[:-1], *given)

    assert done.returncode == 0, done.stderr
    assert "0 of 20" in done.stdout
    assert "Server-Timing /detect: " in done.stderr
    assert refused.returncode == 1


def test_the_limits_of_nginx_are_reported(deployment: Deployment, tmp_path: Path) -> None:
    """This is the last test, because it uses the limits up."""
    file = tmp_path / "out.json"
    before = len(deployment.log_lines())
    done = deployment.bench("open", "--rate", 1000, "--duration", 2, "--url", URL, *deployment.access, "--json", file)
    outcome = load_record(file).runs[0].outcome
    statuses = [line["status"] for line in deployment.log_lines()[before:]]

    assert done.returncode == 1
    assert "rate_limited" in outcome.codes["429"]
    assert outcome.statuses["429"] == statuses.count("429")
    assert "200" in outcome.statuses
