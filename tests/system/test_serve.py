"""`serve` as a user runs it: real processes, real sockets, and nothing left behind."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from app.embedded.launch import shm_prefix
from app.settings.schema import Settings
from app.triton import shared_memory
from bench.harness.ports import find_free
from bench.harness.triton import link_installation
from tests.fakes.triton import FakeTriton, infer_response
from tests.fakes.triton import serving as serving_fake
from tests.faults.exchange import ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.processes import has_ended, wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import REPOSITORY, ROOT, SCENE, free_port, sample_image

TRITON_WAS_KILLED = "nereid: Triton exited with code -9; restarting it"
CAT = sample_image("chelsea.jpg")
MODEL = "yolo11n"
STUB = "triton_python_b"
"""How the names of the processes begin in which Triton runs its models; the kernel keeps 15 characters."""


class Running:
    """A `serve` process and where it listens."""

    def __init__(self, settings: Settings, log: Path) -> None:
        (self.port,) = find_free(1)
        self.settings = settings
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        environ = {
            **os.environ,
            "NEREID_PORT": str(self.port),
            "NEREID_MODEL_REPOSITORY": settings.model_repository,
            "NEREID_TRITON_HOME": settings.triton_home,
            "NEREID_MAX_FILE_SIZE_MB": "1",
            "NEREID_TIMEOUT_SECONDS": "30",  # nothing is rejected for being late on a busy machine, nor because others wait
            "NEREID_MAX_REQUESTS": "64",
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve"], cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
            )

    def family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def triton(self) -> psutil.Process:
        return next(process for process in self.family() if process.name() == "tritonserver" and not has_ended(process))

    def backend(self) -> psutil.Process:
        """Find one of the processes in which that Triton runs the default model."""
        stubs = [process for process in self.family() if process.name().startswith(STUB) and not has_ended(process)]
        return next(process for process in stubs if any(f"/{MODEL}/" in argument for argument in process.cmdline()))

    def detects(self) -> bool:
        return "cat" in httpx.post(f"{self.url}/detect", content=CAT, timeout=30).text

    def shm(self) -> list[Path]:
        """List the files of its Triton in /dev/shm."""
        return list(shared_memory.SHM.glob(f"{shm_prefix(self.settings)}*"))

    @property
    def messages(self) -> str:
        """Its messages to the user."""
        return "".join(line for line in self.log.read_text().splitlines(keepends=True) if line.startswith("nereid: "))

    def is_ready(self) -> bool:
        try:
            return "nereid: ready: " in self.messages and httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def have_ended(processes: Iterable[psutil.Process]) -> bool:
    return all(map(has_ended, processes))


@pytest.fixture(scope="module")
def settings(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with only the default model, so that Triton starts soon."""
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(Path(settings.model_repository, MODEL), repository / MODEL)
    return msgspec.structs.replace(settings, model_repository=str(repository))


@contextmanager
def serving(settings: Settings, folder: Path) -> Iterator[Running]:
    """Run `serve` until the block ends, however it ends; each home has one Triton, so it has a home of its own."""
    home = folder / "home"
    home.mkdir()
    link_installation(home)
    settings = msgspec.structs.replace(settings, triton_home=str(home))
    running = Running(settings, folder / "serve.log")
    family: list[psutil.Process] = []
    try:
        wait_for(running.is_ready)
        family = running.family()
        yield running
    finally:
        print(running.log.read_text())  # noqa: T201 - shown where a test fails
        everyone = {*family, *running.family()}
        for process in everyone:
            if process.is_running():
                process.kill()
        running.process.wait()
        wait_for(lambda: have_ended(everyone))
        shared_memory.sweep()  # killed processes could not clean up; the next worker would
        for left in running.shm():
            left.unlink()
        shutil.rmtree(settings.triton_folder)


@pytest.fixture(scope="module")
def running(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for the tests that leave it as it is, or as good as new."""
    with serving(settings, tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_a_signal_stops_everything(settings: Settings, tmp_path: Path, stop: signal.Signals) -> None:
    with serving(settings, tmp_path) as running:
        family = running.family()
        assert {"tritonserver"} < {process.name() for process in family}
        assert running.shm()
        assert httpx.post(f"{running.url}/detect", content=CAT, timeout=30).status_code == 200
        arenas = {path for process in family for path in shared_memory.SHM.glob(f"nereid-{process.pid}-*")}
        assert arenas
        running.process.send_signal(stop)
        code = running.process.wait()

        assert code == 0
        wait_for(lambda: have_ended(family))
        assert not running.shm()
        assert not any(path.exists() for path in arenas)
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url)


def test_more_signals_do_not_interrupt_the_clean_up(settings: Settings, tmp_path: Path) -> None:
    with serving(settings, tmp_path) as running:
        family = running.family()

        def has_ended_although_it_is_told_again() -> bool:
            running.process.send_signal(signal.SIGINT)
            return running.process.poll() is not None

        wait_for(has_ended_although_it_is_told_again)
        assert running.process.returncode == 0
        wait_for(lambda: have_ended(family))
        assert not running.shm()


def test_a_worker_ends_with_the_process_that_started_it(settings: Settings, tmp_path: Path) -> None:
    with serving(settings, tmp_path) as running:
        family = running.family()
        api = next(process for process in family if process.name() == "nereid")
        workers = [process for process in family if "worker" in process.name()]
        assert workers
        os.kill(running.process.pid, signal.SIGSTOP)
        api.kill()

        wait_for(lambda: have_ended(workers))


def test_no_process_outlives_a_killed_parent(settings: Settings, tmp_path: Path) -> None:
    """SIGKILL gives it no chance to clean up."""
    with serving(settings, tmp_path) as running:
        family = running.family()
        running.process.kill()

        wait_for(lambda: have_ended(family))


def test_the_parent_of_the_workers_has_no_grpc() -> None:
    """A forked process that inherits gRPC's threads hangs or crashes."""
    script = "import sys, app.__main__; sys.exit('grpc' in sys.modules or 'app.main' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("is_port_free", [False, True])
def test_a_port_or_a_home_in_use_is_reported(running: Running, is_port_free: bool) -> None:  # noqa: FBT001
    port = free_port() if is_port_free else running.port
    environ = {**os.environ, "NEREID_PORT": str(port), "NEREID_TRITON_HOME": running.settings.triton_home}
    second = subprocess.run(
        [sys.executable, "-m", "app", "serve"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )

    assert second.returncode == 1
    assert re.fullmatch(
        rf"(nereid: another process.* runs the Triton in {running.settings.triton_home}; .*\n){{2}}"
        if is_port_free
        else f"nereid: port {port} is in use by process .* -m app serve\\); end it, or choose another with --port\n",
        second.stderr,
    )
    assert running.is_ready()


def test_other_commands_find_triton_by_its_home(running: Running) -> None:
    environ = {
        **os.environ,
        "NEREID_PORT": str(running.port),
        "NEREID_TRITON_HOME": running.settings.triton_home,
        "NEREID_MODEL_REPOSITORY": running.settings.model_repository,
    }
    doctor = [sys.executable, "-m", "app", "doctor", "--json"]
    said = json.loads(subprocess.run(doctor, cwd=ROOT, env=environ, stdout=subprocess.PIPE, check=False).stdout)
    severities = {finding["code"]: finding["severity"] for finding in said["findings"]}

    assert (severities["triton"], severities["shared_memory"]) == ("ok", "ok")


@asynccontextmanager
async def two_instances(folder: Path) -> AsyncIterator[tuple[FakeTriton, Fleet]]:
    """Run two instances that may have one request at a time, on a Triton of the test's own."""
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    async with serving_fake(fake):
        settings = {"triton_endpoints": fake.url, "model": "tiny", "max_requests": 1, "timeout_seconds": 60}
        running = running_fleet(REPOSITORY, folder, settings=settings)
        fleet = await asyncio.to_thread(running.__enter__)  # the instances ask that Triton, which runs in this event loop
        try:
            yield fake, fleet
        finally:
            fake.may_answer.set()
            await asyncio.to_thread(running.__exit__, None, None, None)


async def is_full(url: str) -> bool:
    """Return whether an instance rejects a request because of others; instances learn of each other within a second."""
    for _ in range(20):
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                answer = await ask(url, encode(SCENE))
            return (answer.status, json.loads(answer.body)["code"]) == (429, "gateway_full")
    return False


async def test_instances_are_one_service(tmp_path: Path) -> None:
    async with two_instances(tmp_path) as (fake, fleet):
        first, second = (f"unix:{socket}" for socket in fleet.sockets)
        fake.may_answer.clear()
        request = asyncio.create_task(ask(first, encode(SCENE)))
        await asyncio.to_thread(wait_for, lambda: fake.running == 1)
        assert await is_full(second)
        fake.may_answer.set()
        assert (await request).status == 200

        family = fleet.process.children(recursive=True)
        killed, other = sorted(fleet.instances(), key=lambda process: float(process.create_time()))
        killed.kill()
        assert (await ask(second, encode(b"", "/livez", "GET"))).status == 200
        await asyncio.to_thread(wait_for, lambda: fleet.says("instance nereid-1.sock exited with code -9; restart") > 0)
        await asyncio.to_thread(wait_for, fleet.is_ready)
        assert other in fleet.instances()

        family += fleet.process.children(recursive=True)
        fleet.process.terminate()
        assert await asyncio.to_thread(fleet.process.wait) == 0
        assert have_ended(family)
        assert fleet.sockets == []


def test_a_killed_api_is_started_again(running: Running) -> None:
    triton, family = running.triton(), running.family()
    api = next(process for process in family if process.name() == "nereid")
    own = [api, *api.children()]
    api.kill()

    wait_for(lambda: have_ended(own))
    wait_for(running.is_ready)
    assert "nereid: the API exited with code -9; restarting it\n" in running.messages
    assert not has_ended(triton)
    assert running.detects()


def test_a_killed_triton_is_started_again(running: Running) -> None:
    before = running.messages.count(TRITON_WAS_KILLED)
    for _ in range(2):
        running.triton().kill()
        during = httpx.post(f"{running.url}/detect", content=CAT, timeout=30)
        assert during.status_code == 503
        assert during.headers["retry-after"]
        wait_for(running.detects)

    assert running.messages.count(TRITON_WAS_KILLED) == before + 2


def test_triton_without_its_backend_is_started_again(running: Running) -> None:
    """It does not notice that a process has died in which it runs a model, and fails requests from then on."""
    triton = running.triton()
    running.backend().kill()

    wait_for(lambda: has_ended(triton))
    wait_for(lambda: "nereid: Triton does not work (" in running.messages)
    wait_for(running.detects)
