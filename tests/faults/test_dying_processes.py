"""Workers, instances, models and Triton that die or hang while clients ask: through NGINX, as in production."""

import asyncio
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from app.host.http import get_status
from app.triton.shared_memory import SHM
from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.exchange import Connection, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import Traffic, every, meanwhile, traffic, until
from tests.faults.serving import serving
from tests.faults.test_resources import NEEDS_MOUNTS
from tests.nginx import proxying
from tests.processes import PATIENCE_SECONDS, has_ended, wait_until_gone
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

_DEADLINE = 5
_IMAGE = models.solid(1, 2, 3)
_SOAK_ANSWERS, _SOAK_REQUESTS, _WARM_UP = 50_000, 100_000, 20_000
_GIVE_UPS = 0.2


@contextmanager
def behind_nginx(fleet: Fleet) -> Iterator[str]:
    (folder := fleet.folder / "nginx").mkdir()
    with proxying([f"unix:{socket}" for socket in fleet.sockets], folder) as proxy:
        yield proxy.local_url


@pytest.fixture(scope="module")
def fleet(fault_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(fault_repository, tmp_path_factory.mktemp("fleet"), settings={"timeout_seconds": _DEADLINE}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    with behind_nginx(fleet) as url:
        yield url


@asynccontextmanager
async def asking(fleet: Fleet, url: str, clients: int = 8) -> AsyncIterator[Traffic]:
    await until(fleet.is_ready)
    async with traffic(url, clients) as counted:
        await counted.until(100)
        yield counted


def assert_nothing_is_lost(counted: Traffic) -> None:
    """On a busy machine a deadline may pass, for as many as ask at once."""
    assert {200} <= set(counted.statuses) <= {200, 504}, counted.statuses
    assert counted.statuses[504] <= 8


async def until_gone(*processes: psutil.Process) -> None:
    await asyncio.to_thread(wait_until_gone, processes)


class Death(NamedTuple):
    what: str
    how: signal.Signals
    times: int = 1


@pytest.mark.parametrize(
    "death",
    [
        Death("instance", signal.SIGTERM, times=4),
        Death("instance", signal.SIGKILL),
        Death("instance", signal.SIGSTOP),
        pytest.param(Death("worker", signal.SIGSTOP), marks=pytest.mark.system),
        Death("Triton", signal.SIGTERM),
        Death("Triton", signal.SIGKILL, times=2),
        Death("Triton", signal.SIGSTOP),
    ],
    ids=lambda death: f"{death.what}-{death.how.name}",
)
async def test_process_that_ends_or_hangs_is_replaced(fleet: Fleet, url: str, death: Death) -> None:
    """No request is lost, unless there is no Triton."""
    is_triton = death.what == "Triton"
    async with asking(fleet, url, clients=16 if is_triton else 8) as counted:
        for _ in range(death.times):
            instance, triton = fleet.instances()[0], fleet.triton()
            assert triton is not None
            family = {"instance": [instance, *fleet.workers_of(instance)], "worker": fleet.workers_of(instance), "Triton": [triton]}
            first = family[death.what][0]
            first.send_signal(death.how)
            await until_gone(first)
            if (death.what, death.how) == ("instance", signal.SIGTERM):
                assert get_status(f"{url}/readyz", PATIENCE_SECONDS) == 200
            await until_gone(*family[death.what])
            if death.what == "worker":
                assert fleet.says(f"worker {first.pid} does not respond; replacing it")
            await until(lambda: len(fleet.instances()) == len(fleet.workers()) == 2)
            await until(fleet.is_ready)
            await counted.until(counted.requests + 500)

    if is_triton:
        assert {200} <= set(counted.statuses) <= {200, 429, 503, 504}
        assert counted.slowest < 2 * _DEADLINE
    else:
        assert_nothing_is_lost(counted)


async def test_worker_that_dies_again_does_not_end_the_service(fleet: Fleet, url: str) -> None:
    """The instance gives up; `serve` starts another one, and the other instance serves meanwhile."""
    before = fleet.says("; restarting it")
    async with asking(fleet, url) as counted:
        instance = fleet.instances()[0]

        def die() -> bool:
            for worker in fleet.workers_of(instance):
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
            return has_ended(instance)

        await until(die)
        await until(lambda: len(fleet.instances()) == 2)
        await until(fleet.is_ready)
        await counted.until(counted.requests + 500)

    assert fleet.says("; restarting it") > before
    assert_nothing_is_lost(counted)


@pytest.mark.parametrize("seconds", [pytest.param(1.6, marks=pytest.mark.system), 2.5])
async def test_late_process_of_a_model_gives_no_answer_of_another_image(
    fault_repository: Path, tmp_path: Path, seconds: float
) -> None:
    """Triton takes one of two for dead after a second, and then reads its late results as those of later requests."""
    repository = shutil.copytree(fault_repository, tmp_path / "models")
    config = repository / "checksum" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("count: 1", "count: 2"), encoding="utf-8")
    with running_fleet(repository, tmp_path, settings={"timeout_seconds": _DEADLINE}) as fleet, behind_nginx(fleet) as url:
        async with asking(fleet, url) as counted:
            for _ in range(3):
                stubs: list[psutil.Process] = []
                await until(lambda stubs=stubs: stubs.extend(fleet.stubs("checksum")) or stubs)  # type: ignore[misc]
                with suppress(psutil.NoSuchProcess):  # Triton has been restarted
                    stubs[0].send_signal(signal.SIGSTOP)
                    await asyncio.sleep(seconds)
                    stubs[0].send_signal(signal.SIGCONT)
                answered = counted.statuses[200] + 200
                await until(lambda answered=answered: counted.statuses[200] > answered)  # type: ignore[misc]
            await until(lambda: len(fleet.stubs("checksum")) == 2 and fleet.is_ready())
            triton = fleet.triton()
            assert triton is not None
            fleet.stubs("checksum")[0].kill()  # the other one goes on, but is not enough
            await until(lambda: has_ended(triton))
            await until(lambda: len(fleet.stubs("checksum")) == 2)
            await counted.until(counted.requests + 200)


@pytest.mark.system
async def test_workers_are_renewed_without_a_loss(fault_repository: Path, tmp_path: Path) -> None:
    """Those that use too much memory, here all of them, and those of an instance that gets SIGHUP."""
    settings = {"worker_max_memory_mb": 10, "timeout_seconds": 20, "body_seconds": 60}
    with running_fleet(fault_repository, tmp_path, settings=settings) as fleet, behind_nginx(fleet) as url:
        first = set(fleet.workers())
        async with asking(fleet, url) as counted:
            request = encode(_IMAGE, Content_Type="image/png")
            async with await Connection.open(f"unix:{fleet.sockets[0]}") as upload:
                await upload.send(request[:-1])
                fleet.instances()[0].send_signal(signal.SIGHUP)
                await until(lambda: set(fleet.workers()) - first)
                await upload.send(request[-1:])
                assert (await upload.receive()).status == 200
            await until(lambda: len(set(fleet.workers()) & first) <= 1)
            hung_up = set(fleet.workers())
            await until(lambda: not set(fleet.workers()) & (hung_up | first))
            await counted.until(counted.requests + 500)

    assert_nothing_is_lost(counted)


@NEEDS_MOUNTS
@pytest.mark.system
async def test_triton_is_restarted_on_a_full_disk(fault_repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "triton"
    mount = f"cp -a {home} {tmp_path}/links && mount -t tmpfs -o size=1m tmpfs {home} && cp -a {tmp_path}/links/. {home}"
    wrapper = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    with running_fleet(fault_repository, tmp_path, instances=1, wrapper=wrapper) as fleet:
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
        assert (await ask(f"unix:{fleet.sockets[0]}", encode(_IMAGE, Content_Type="image/png"))).status == 200

        assert fleet.says("; restarting it") == fleet.says("Triton exited with code -9") == 1


def to_request(source: random.Random, deadline: str = "") -> tuple[models.Checksum, bytes]:
    checksum = models.Checksum.draw(source)
    return checksum, encode(checksum.image, f"/predict/checksum?boxes=pixel{deadline}", Content_Type="image/png")


async def leave(url: str, request: bytes, source: random.Random) -> None:
    """Send a request, and hang up at any time before its answer."""
    async with await Connection.open(url) as connection:
        await connection.send(request)
        await asyncio.sleep(source.uniform(0, 0.010))
        connection.abort()


@pytest.mark.soak
async def test_every_answer_belongs_to_its_request(fault_repository: Path, tmp_path: Path) -> None:
    source = random.Random(2)  # noqa: S311 - not a secret
    ends: Counter[str] = Counter()
    with running_fleet(fault_repository, tmp_path) as fleet, behind_nginx(fleet) as url:

        def kill_triton() -> None:
            if triton := fleet.triton():
                triton.kill()
                ends["Triton"] += 1

        async def keep_leaving() -> None:
            while True:
                await leave(url, to_request(source)[1], source)
                await asyncio.sleep(0.05)

        leaving = [keep_leaving() for _ in range(4)]
        deaths = every(12, kill_triton), every(17, lambda: source.choice(fleet.workers()).kill())
        async with meanwhile(*leaving, *deaths), traffic(url, clients=16) as counted:
            end = monotonic() + 1200
            while counted.statuses[200] < _SOAK_ANSWERS:
                assert monotonic() < end, counted.statuses
                await asyncio.sleep(0.1)

    assert set(counted.statuses) <= {200, 503}
    assert ends["Triton"] >= 3


@pytest.mark.soak
async def test_gateway_leaks_no_memory_files_or_threads(triton: Triton, tmp_path: Path) -> None:
    """A fifth of the clients hang up, and another fifth give up after milliseconds, from which an older Triton dies."""
    created = triton.process.create_time()
    done, statuses = 0, Counter[int]()
    samples: list[tuple[int, int]] = []

    async def call(seed: int, last: int) -> None:
        nonlocal done
        source = random.Random(seed)  # noqa: S311 - not a secret
        async with await Connection.open(gateway.url) as connection:
            while done < last:
                done += 1
                if done % 1_000 == 0:
                    samples.append((done, gateway.rss()))
                kind = source.random()
                deadline = f"&timeout_ms={source.randint(1, 10)}" if kind > 1 - _GIVE_UPS else ""
                checksum, request = to_request(source, deadline)
                if kind < _GIVE_UPS:
                    await leave(gateway.url, request, source)
                else:
                    answer = await connection.ask(request)
                    statuses[answer.status] += 1
                    assert answer.status != 200 or checksum.is_box(json.loads(answer.body)["detections"][0])

    async def send(last: int) -> list[int]:
        """Send so many requests in all; return how many files, threads and arenas the workers have when they are idle again."""
        await asyncio.gather(*(call(seed, last) for seed in range(8)))
        await asyncio.sleep(8)
        threads = sum(worker.num_threads() for worker in gateway.workers())
        arenas = [path for pid in gateway.pids() for path in SHM.glob(f"nereid-{pid}-*")]
        return [gateway.fds(), threads, len(arenas)]

    with serving(triton, tmp_path, settings={"model": "checksum", "log_level": "warning"}) as gateway:
        pids = gateway.pids()
        before = await send(_WARM_UP)
        samples.clear()
        after = await send(_WARM_UP + _SOAK_REQUESTS)
        assert gateway.pids() == pids
    counts, bytes_ = np.array(samples, float).T
    slope = float(np.polyfit(counts, bytes_, 1)[0]) * 10_000 / 1e6

    assert slope <= 1  # MB per 10,000 requests
    np.testing.assert_allclose(after, before, atol=2)
    assert {200, 504} <= set(statuses) <= {200, 429, 503, 504}
    assert (triton.process.is_running(), triton.process.create_time()) == (True, created)
