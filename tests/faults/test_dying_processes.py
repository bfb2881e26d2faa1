"""Workers, instances and Triton that die or hang while clients ask: through NGINX, as in production."""

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import psutil
import pytest

from app.host.http import get_status
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.test_resources import NEEDS_MOUNTS
from tests.faults.traffic import Traffic, traffic
from tests.nginx import proxying
from tests.processes import has_ended
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(fault_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(fault_repository, tmp_path_factory.mktemp("fleet"), settings={"timeout_seconds": 5}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def url(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with proxying([f"unix:{socket}" for socket in fleet.sockets], tmp_path_factory.mktemp("nginx")) as proxy:
        yield proxy.local_url


@asynccontextmanager
async def asking(fleet: Fleet, url: str, clients: int = 8) -> AsyncIterator[Traffic]:
    await until(fleet.is_ready)
    async with traffic(url, clients) as counted:
        await counted.until(100)
        yield counted


async def until(holds: Callable[[], object]) -> None:
    end = monotonic() + _PATIENCE_SECONDS
    while not await asyncio.to_thread(holds):
        assert monotonic() < end
        await asyncio.sleep(0.02)


async def until_gone(process: psutil.Process) -> None:
    await until(lambda: has_ended(process))


class Death(NamedTuple):
    what: str
    how: signal.Signals
    limit: float
    """Seconds until it is gone."""
    statuses: set[int]
    times: int = 1


DEATHS = [
    Death("instance", signal.SIGTERM, 60, {200}, times=4),
    Death("instance", signal.SIGKILL, 10, {200}),
    Death("instance", signal.SIGSTOP, 40, {200}),
    Death("worker", signal.SIGSTOP, 15, {200}),
    Death("Triton", signal.SIGTERM, 60, {200, 503}),
    Death("Triton", signal.SIGKILL, 10, {200, 503}, times=2),
    Death("Triton", signal.SIGSTOP, 40, {200, 503, 504}),
]


@pytest.mark.parametrize("death", DEATHS, ids=[f"{death.what}-{death.how.name}" for death in DEATHS])
async def test_process_that_ends_or_hangs_is_replaced(fleet: Fleet, url: str, record_figure: RecordFigure, death: Death) -> None:
    label = f"{death.how.name} of {death.what}"
    async with asking(fleet, url, clients=16 if death.what == "Triton" else 8) as counted:
        for _ in range(death.times):
            instance, triton = fleet.instances()[0], fleet.triton()
            assert triton is not None
            family = {"instance": [instance, *fleet.workers_of(instance)], "worker": fleet.workers_of(instance), "Triton": [triton]}
            first, *others = family[death.what]
            first.send_signal(death.how)
            started = monotonic()
            await until_gone(first)
            record_figure(f"{label}: gone after, s", monotonic() - started, death.limit)
            if (death.what, death.how) == ("instance", signal.SIGTERM):
                assert get_status(f"{url}/readyz", 5) == 200
            for process in others:
                await until_gone(process)
            await until(lambda: len(fleet.instances()) == len(fleet.workers()) == 2)
            await until(fleet.is_ready)
            await counted.until(counted.requests + 500)
    counted.record(record_figure, label, slowest=5.25 if death.what == "Triton" else None)

    assert {200} <= set(counted.statuses) <= death.statuses


async def test_worker_that_dies_again_does_not_end_the_service(fleet: Fleet, url: str, record_figure: RecordFigure) -> None:
    """The third time, the instance gives up; `serve` starts another one, and the other instance serves meanwhile."""
    before = fleet.says("; restarting it")
    async with asking(fleet, url) as counted:
        instance = fleet.instances()[0]
        for _ in range(3):
            await until(lambda: has_ended(instance) or fleet.workers_of(instance))
            for worker in fleet.workers_of(instance):
                worker.kill()
                await until_gone(worker)
        await until_gone(instance)
        await until(lambda: len(fleet.instances()) == 2)
        await until(fleet.is_ready)
        await counted.until(counted.requests + 500)
    counted.record(record_figure, "worker killed three times")

    assert fleet.says("; restarting it") > before
    assert set(counted.statuses) == {200}


async def detect(url: str) -> Answer:
    return await ask(url, encode(models.solid(1, 2, 3), Content_Type="image/png"))


def twice(fault_repository: Path, folder: Path) -> Path:
    """Return a repository whose `checksum` has two processes."""
    repository = shutil.copytree(fault_repository, folder / "models")
    config = repository / "checksum" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("count: 1", "count: 2"), encoding="utf-8")
    return repository


@pytest.mark.parametrize("model", ["checksum", "faulty"])
async def test_model_that_has_lost_a_process_is_repaired(
    fault_repository: Path, tmp_path: Path, record_figure: RecordFigure, model: str
) -> None:
    repository = twice(fault_repository, tmp_path)
    image = encode(models.solid(1, 2, 3), f"/predict/{model}", Content_Type="image/png")
    statuses: Counter[int] = Counter()
    with running_fleet(repository, tmp_path, instances=1) as fleet:
        url = f"unix:{fleet.sockets[0]}"
        assert (await ask(url, image)).status == 200
        triton, stubs = fleet.triton(), fleet.stubs(model)
        assert triton is not None
        stubs[0].kill()
        await until_gone(stubs[0])
        started = monotonic()
        while not has_ended(triton):
            statuses[(await ask(url, image)).status] += 1
            assert monotonic() < started + _PATIENCE_SECONDS, statuses
        noticed = monotonic() - started
        while (await ask(url, image)).status != 200:
            assert monotonic() < started + _PATIENCE_SECONDS
            await asyncio.sleep(0.02)
        record_figure(f"process of {model} killed: Triton restarted after, s", noticed, 3)  # of which Triton takes one to find out
        record_figure(f"process of {model} killed: all is well after, s", monotonic() - started)
        assert len(fleet.stubs(model)) == len(stubs)


@pytest.mark.parametrize("seconds", [pytest.param(1.6, marks=pytest.mark.system), 2.5])
async def test_late_process_of_a_model_gives_no_answer_of_another_image(
    fault_repository: Path, tmp_path: Path, record_figure: RecordFigure, seconds: float
) -> None:
    """Triton takes it for dead after a second, and then reads its late results as those of later requests."""
    repository, nginx = twice(fault_repository, tmp_path), tmp_path / "nginx"
    nginx.mkdir()
    with (
        running_fleet(repository, tmp_path, settings={"timeout_seconds": 5}) as fleet,
        proxying([f"unix:{socket}" for socket in fleet.sockets], nginx) as proxy,
    ):
        async with asking(fleet, proxy.local_url) as counted:
            for _ in range(3):
                stub = fleet.stubs("checksum")[0]
                stub.send_signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                with suppress(psutil.NoSuchProcess):  # Triton has been restarted
                    stub.send_signal(signal.SIGCONT)
                answered = counted.statuses[200] + 200
                await until(lambda answered=answered: counted.statuses[200] > answered)  # type: ignore[misc]
    counted.record(record_figure, f"process of a model hangs for {seconds} s")


@pytest.mark.system
async def test_workers_are_renewed_without_a_loss(fault_repository: Path, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Those that use too much memory, here all of them, and those of an instance that gets SIGHUP."""
    (tmp_path / "nginx").mkdir()
    with running_fleet(fault_repository, tmp_path, settings={"worker_max_memory_mb": 10, "timeout_seconds": 20}) as fleet:
        sockets = [f"unix:{socket}" for socket in fleet.sockets]
        with proxying(sockets, tmp_path / "nginx") as proxy:
            first = set(fleet.workers())
            async with asking(fleet, proxy.local_url) as counted:
                fleet.instances()[0].send_signal(signal.SIGHUP)
                await until(lambda: len(set(fleet.workers()) & first) == 1)
                hung_up = set(fleet.workers())
                await until(lambda: not set(fleet.workers()) & (hung_up | first))
                await counted.until(counted.requests + 500)
    counted.record(record_figure, "renewed workers")

    assert set(counted.statuses) == {200}


@NEEDS_MOUNTS
@pytest.mark.system
async def test_triton_is_restarted_on_a_full_disk(fault_repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "triton"
    mount = f"cp -a {home} {tmp_path}/links && mount -t tmpfs -o size=1m tmpfs {home} && cp -a {tmp_path}/links/. {home}"
    wrapper = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    with running_fleet(fault_repository, tmp_path, instances=1, wrapper=wrapper) as fleet:
        url = f"unix:{fleet.sockets[0]}"
        seen = Path("/proc", str(fleet.process.pid), "root", str(home).lstrip("/"))
        with suppress(OSError), (seen / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        triton = fleet.triton()
        assert triton is not None
        triton.kill()
        await until_gone(triton)
        await until(lambda: fleet.triton() not in {None, triton})
        await until(fleet.is_ready)
        assert (await detect(url)).status == 200

        assert fleet.says("; restarting it") == fleet.says("Triton exited with code -9") == 1
