"""`serve` as a user runs it: real processes, real sockets, and nothing left behind."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

import httpx
import pytest

from app.embedded.launch import shm_prefix
from app.settings.schema import Settings
from app.triton import shared_memory
from bench.harness.processes import running
from tests.fakes.triton import FakeTriton
from tests.fakes.triton import serving as serving_fake
from tests.faults.exchange import ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.serving import apart
from tests.processes import has_ended, wait_for, wait_until_gone
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import REPOSITORY, ROOT, SCENE, free_port, sample_image

CAT = sample_image("chelsea.jpg")
MODEL = "yolo11n"
READY_SECONDS = 300  # a first run downloads Triton and the model


def detects(fleet: Fleet) -> bool:
    return "cat" in httpx.post(f"{fleet.url}/detect", content=CAT, timeout=30).text


def shm(settings: Settings) -> list[Path]:
    """List the files of a Triton in /dev/shm."""
    return list(shared_memory.SHM.glob(f"{shm_prefix(settings)}*"))


@pytest.fixture(scope="module")
def models(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with only the default model, so that Triton starts soon."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(repository / MODEL, folder / MODEL)
    return folder


@contextmanager
def serving(models: Path, folder: Path) -> Iterator[Fleet]:
    """Run `serve` without instances until the block ends, and remove what it leaves if it is killed."""
    settings = {"model": MODEL, "timeout_seconds": 30}  # nothing is rejected for being late on a busy machine
    try:
        with running_fleet(models, folder, instances=0, settings=settings) as fleet:
            wait_for(fleet.is_ready)
            family = fleet.family()
            yield fleet
        wait_until_gone(family)
    finally:
        shared_memory.sweep()  # killed processes could not clean up; the next worker would
        own = Settings(triton_home=str(folder / "triton"))
        for left in shm(own):
            left.unlink()
        shutil.rmtree(own.triton_folder)


@pytest.fixture(scope="module")
def fleet(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server for the tests that leave it as it is, or as good as new."""
    with serving(models, tmp_path_factory.mktemp("serve")) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("stop", "is_repeated"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["ctrl-c", "terminate", "ctrl-c again and again"],
)
def test_a_signal_stops_everything(models: Path, tmp_path: Path, stop: signal.Signals, *, is_repeated: bool) -> None:
    with serving(models, tmp_path) as fleet:
        family, own = fleet.family(), Settings(triton_home=str(fleet.folder / "triton"))
        assert {"tritonserver"} < {process.name() for process in family}
        assert shm(own)
        assert detects(fleet)
        arenas = {path for process in family for path in shared_memory.SHM.glob(f"nereid-{process.pid}-*")}
        assert arenas
        fleet.process.send_signal(stop)
        while is_repeated and not has_ended(fleet.process):
            fleet.process.send_signal(stop)
            sleep(0.02)

        assert fleet.process.wait() == 0
        wait_until_gone(family)
        assert not shm(own)
        assert not any(path.exists() for path in arenas)
        with pytest.raises(httpx.ConnectError):
            httpx.get(fleet.url)


def test_no_process_outlives_a_killed_parent(models: Path, tmp_path: Path) -> None:
    """SIGKILL gives it no chance to clean up."""
    with serving(models, tmp_path) as fleet:
        family = fleet.family()
        fleet.process.kill()

        wait_until_gone(family)


def test_serve_detects_and_stops(tmp_path: Path) -> None:
    """With nothing but the project's own folder: what `./just smoke` runs under every interpreter."""
    port = free_port()
    environment = {"NEREID_PORT": str(port)}
    command = [sys.executable, "-m", "app", "serve"]
    with running(command, environment, port, "/readyz", tmp_path / "serve.log", ready_seconds=READY_SECONDS) as server:
        for name, expected in (("chelsea.jpg", "cat"), ("coffee.jpg", "cup")):
            answer = httpx.post(f"{server.url}/detect", content=sample_image(name), timeout=30).raise_for_status().json()
            assert expected in {detection["class_name"] for detection in answer["detections"]}
        server.process.send_signal(signal.SIGINT)

        assert server.process.wait(60) == 0


def test_the_parent_of_the_workers_has_no_grpc() -> None:
    """A forked process that inherits gRPC's threads hangs or crashes."""
    script = "import sys, app.__main__; sys.exit('grpc' in sys.modules or 'app.main' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


async def is_full(url: str) -> bool:
    """Return whether an instance rejects a request because of others; instances learn of each other within a second."""
    for _ in range(20):
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                answer = await ask(url, encode(SCENE))
            return (answer.status, json.loads(answer.body)["code"]) == (429, "gateway_full")
    return False


async def test_instances_are_one_service(tmp_path: Path) -> None:
    fake, settings = FakeTriton().find_nothing(), {"model": "tiny", "max_requests": 1, "timeout_seconds": 60}
    async with (
        serving_fake(fake),
        apart(running_fleet(REPOSITORY, tmp_path, settings={**settings, "triton_endpoints": fake.url})) as fleet,
    ):
        first, second = (f"unix:{socket}" for socket in fleet.sockets)
        fake.may_answer.clear()
        request = asyncio.create_task(ask(first, encode(SCENE)))
        await asyncio.to_thread(wait_for, lambda: fake.running == 1)
        assert await is_full(second)
        fake.may_answer.set()
        assert (await request).status == 200

        family = fleet.family()
        fleet.process.terminate()
        assert await asyncio.to_thread(fleet.process.wait) == 0
        assert all(map(has_ended, family))
        assert fleet.sockets == []
