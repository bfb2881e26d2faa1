"""Tritons as `tritonserver@0` and `tritonserver@1` start them, but on the CPU, behind a gateway that uses both."""

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from app.embedded import launch, server
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from bench.harness.ports import find_free
from bench.harness.triton import Triton
from tests.deploy.needs import triton_command
from tests.deploy.test_models_profile import NEWER
from tests.faults import models
from tests.faults.exchange import ask, encode
from tests.faults.meanwhile import traffic
from tests.faults.serving import gateway_to
from tests.faults.test_several_tritons import until_share
from tests.support import triton_home

_REQUESTS = 300
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
