"""Tritons as `tritonserver@0` and `tritonserver@1` start them, but on the CPU, behind a gateway that uses both.

And what happens when the network to one on another host is lost.
"""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from app.embedded import launch, server
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import Triton, embedded_triton
from tests.deploy.needs import triton_command
from tests.deploy.test_models_profile import NEWER
from tests.faults import models
from tests.faults.exchange import Line, ask, encode
from tests.faults.meanwhile import traffic
from tests.faults.serving import count_images, gateway_to
from tests.networks import NEEDS_NETWORKS, bring_up, enter, ip, network
from tests.processes import PATIENCE_SECONDS
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import triton_home

_REQUESTS = 300
_SHARE = 0.4
"""What a Triton that is back must get of the images."""
_DEADLINE = 5
_ADDRESS, _PORT = "10.99.0.2", 4601
"""Where the gateway finds Triton in another network."""
_NEEDED = ("--backend-directory", "--backend-config", "--model-config-name", "--disable-auto-complete-config")
"""Options of the embedded Triton, whose backend and configs are not those of a Triton for GPUs."""

Start = Callable[[int, Path, str], "UnitTriton"]


class UnitTriton(EmbeddedTriton):
    """A Triton that listens where the unit for a GPU says, but at free ports."""

    def __init__(self, folder: Path, gpu: int, repository: Path, model: str) -> None:
        words = [word for word in triton_command(gpu, MODELS=str(repository)) if word.split("=")[0].removeprefix("--") not in NEWER]
        names = [word.removesuffix(f"=80{gpu}{digit}") for digit in range(3) for word in words if word.endswith(f"=80{gpu}{digit}")]
        self.ports = dict(zip(names, find_free(3), strict=True))
        self.options = [f"{name}={self.ports[name]}" if (name := word.split("=")[0]) in self.ports else word for word in words[1:]]
        address = f"127.0.0.1:{self.ports['--grpc-port']}"
        self.settings = Settings(
            triton_home=triton_home(folder), model_repository=str(repository), model=model, triton_endpoints=address
        )
        super().__init__(self.settings)
        self._client = BlockingClient(address)

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['--metrics-port']}/metrics"

    def answered(self) -> Counter[str]:
        """Return how many calls each model has answered, according to Triton's metrics."""
        shown = httpx.get(self.metrics_url, trust_env=False).text
        counts = re.findall(r'^nv_inference_request_success\{model="(\w+)".*\} (\d+)$', shown, re.MULTILINE)
        return Counter({model: int(count) for model, count in counts})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the Triton of a GPU with the models of a folder, one of which must be ready."""
    made: dict[str, UnitTriton] = {}

    def command(settings: Settings, folder: Path) -> list[str]:
        embedded = launch.command(settings, folder)
        return [embedded[0], *made[settings.triton_home].options, *(word for word in embedded if word.startswith(_NEEDED))]

    monkeypatch.setattr(server, "command", command)
    with ExitStack() as stack:

        def start(gpu: int, repository: Path, model: str) -> UnitTriton:
            (tmp_path / f"home-{gpu}").mkdir()
            triton = UnitTriton(tmp_path / f"home-{gpu}", gpu, repository, model)
            made[triton.settings.triton_home] = triton
            stack.callback(triton.stop)
            triton.start()
            return triton

        yield start


def together(tritons: list[UnitTriton]) -> dict[str, str]:
    return {
        "triton_endpoints": ",".join(triton.settings.triton_address for triton in tritons),
        "triton_metrics_url": ",".join(triton.metrics_url for triton in tritons),
    }


def running(triton: UnitTriton) -> Triton:
    return Triton(triton.settings, psutil.Process(triton.pid), triton)


async def until_share(tritons: list[Triton], place: int) -> None:
    """Wait until a Triton has got its share of the images for a while."""
    before = [await count_images(triton, "checksum") for triton in tritons]
    while True:
        await asyncio.sleep(0.5)
        now = [await count_images(triton, "checksum") for triton in tritons]
        images = [after - first for after, first in zip(now, before, strict=True)]
        if images[place] >= _SHARE * sum(images) > 0:
            return
        before = now


async def test_a_gpu_is_lost_and_comes_back(tmp_path: Path, start: Start) -> None:
    models.write(tmp_path / "models")
    tritons = [start(gpu, tmp_path / "models", "checksum") for gpu in range(2)]
    first, started = running(tritons[0]), [triton.answered() for triton in tritons]
    with gateway_to(first, tmp_path, **together(tritons)) as gateway:
        async with traffic(gateway.url) as counted:
            await counted.until(_REQUESTS)
            calls = [triton.answered() - before for triton, before in zip(tritons, started, strict=True)]
            first.process.kill()
            await counted.until(counted.requests + _REQUESTS)
            await asyncio.to_thread(tritons[0].stop)
            await asyncio.to_thread(tritons[0].start)
            await until_share([running(triton) for triton in tritons], 0)

    assert all(one["checksum"] for one in calls)
    assert set(counted.statuses) == {200}
    assert counted.wrong == []


async def test_models_are_divided_among_gpus(tmp_path: Path, start: Start) -> None:
    models.write(tmp_path / "written")
    (tmp_path / "model_repository").mkdir()
    for gpu, names in enumerate(("ABC", "DEF")):
        (tmp_path / f"gpu-{gpu}").mkdir()
        for name in names:
            model = shutil.copytree(tmp_path / "written" / "checksum", tmp_path / "model_repository" / name)
            config = model / "config.pbtxt"
            config.write_text(config.read_text().replace('name: "checksum"', f'name: "{name}"'))
            (tmp_path / f"gpu-{gpu}" / name).symlink_to(f"../model_repository/{name}")
    tritons = [start(gpu, tmp_path / f"gpu-{gpu}", model) for gpu, model in enumerate("AD")]
    with gateway_to(running(tritons[0]), tmp_path, model="A", **together(tritons)) as gateway:
        started = [triton.answered() for triton in tritons]
        asked = [encode(models.solid(1, 2, 3), f"/predict/{name}", Content_Type="image/png") for name in "ABCDEF"]
        statuses = [(await ask(gateway.url, one)).status for one in asked]
        calls = [triton.answered() - before for triton, before in zip(tritons, started, strict=True)]

    assert statuses == [200] * 6
    assert [set(one) for one in calls] == [set("ABC"), set("DEF")]


def listen(network: str) -> socket.socket:
    """Listen in a network of its own, to which the socket belongs although this process is in another one."""

    def enter_and_listen() -> socket.socket:
        enter(network)
        return socket.create_server((_ADDRESS, _PORT))

    with ThreadPoolExecutor(1) as thread:  # which ends afterwards, in that network
        return thread.submit(enter_and_listen).result()


@contextmanager
def running_gateway(network: str, folder: Path) -> Iterator[str]:
    settings = {
        "NEREID_SOCKET": str(folder / "api.sock"),
        "NEREID_WORKERS": "1",
        "NEREID_TRITON_ENDPOINTS": f"{_ADDRESS}:{_PORT}",
        "NEREID_MODEL": "checksum",
        "NEREID_TIMEOUT_SECONDS": str(_DEADLINE),
    }
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "app", "api"]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**environment_of(ROOT), **settings}, stdout=log, stderr=log)
    try:
        yield f"unix:{folder / 'api.sock'}"
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


async def until_answered(url: str) -> None:
    while True:
        with suppress(OSError):  # the socket is not there yet
            if (await ask(url, encode(models.solid(10, 20, 30), Content_Type="image/png"))).status == 200:
                return
        await asyncio.sleep(0.01)


@pytest.mark.faults
@NEEDS_NETWORKS
async def test_network_that_swallows_everything_costs_a_deadline_at_most(tmp_path: Path) -> None:
    """Nothing comes back from there, not even a refusal."""
    models.write(folder := tmp_path / "models")
    with (
        embedded_triton(folder, "checksum") as triton,
        network(f"nereid-{os.getpid()}-a") as near,
        network(f"nereid-{os.getpid()}-b") as far,
    ):
        line = Line(triton.address)
        ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        bring_up(near, "near", "10.99.0.1")
        bring_up(far, "far", _ADDRESS)
        await line.open(sock=listen(far))
        with running_gateway(near, tmp_path) as url:
            await until_answered(url)
            async with traffic(url) as counted:
                for seconds in (3, 15):
                    await counted.until(counted.requests + 200)
                    ip("-n", far, "link", "set", "far", "down")  # what the near network sends is lost without a word
                    await asyncio.sleep(seconds)
                    ip("-n", far, "link", "set", "far", "up")
                    await until_answered(url)
                await counted.until(counted.requests + 200)
        line.cut()

    assert counted.slowest < 2 * _DEADLINE
    assert set(counted.statuses) <= {200, 503, 504}
