"""Many requests, for long: nothing is lost, mixed up or leaked."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
import pytest

from bench.harness.triton import Triton
from tests.bench.support import arenas_of
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection, ask, encode
from tests.faults.fleet import Fleet, running_fleet
from tests.faults.meanwhile import every, meanwhile
from tests.faults.serving import Gateway, serving
from tests.faults.traffic import traffic
from tests.nginx import proxying
from tests.processes import wait_for

pytestmark = pytest.mark.soak

_GIVE_UPS = 25_000
_ANSWERS = 50_000
_KILL_SECONDS, _KILLS = 10.0, 30
_REQUESTS, _WARM_UP = 100_000, 20_000
_LEAK_REQUESTS = 40_000
_SAMPLE_REQUESTS = 1_000
_DISCONNECTS = 0.2
_MAX_SLOPE_MB = 1.0
"""Per 10,000 requests."""
_SETTLE_SECONDS = 8.0
_PATH = "/predict/checksum?boxes=pixel"

# The gateway, in whose workers SIGUSR2 writes the number of tasks into a file, and each answer may leak some bytes.
_OBSERVED = """
import asyncio, os, signal
from pathlib import Path

leaked = []

def write_tasks(*_):
    Path(os.environ["OBSERVED_FOLDER"], f"tasks-{os.getpid()}").write_text(str(len(asyncio.all_tasks())))

def observe():
    signal.signal(signal.SIGUSR2, write_tasks)
    from app.api.answering import native
    to_response = native.to_response
    def leak(*arguments):
        leaked.append(os.urandom(int(os.environ["OBSERVED_LEAK"])))
        return to_response(*arguments)
    native.to_response = leak

os.register_at_fork(after_in_child=observe)
from app.__main__ import main
main()
"""


@pytest.mark.parametrize("transport", ["shm", "inline"])
async def test_clients_that_give_up(triton: Triton, tmp_path: Path, record_figure: RecordFigure, transport: str) -> None:
    created = triton.process.create_time()
    left = _GIVE_UPS
    counts: Counter[str] = Counter()

    async def give_up(seed: int) -> None:
        nonlocal left
        source = random.Random(seed)  # noqa: S311 - not a secret
        while left > 0:
            left -= 1
            image = models.Checksum.draw(source).image
            if source.random() < 0.5:
                path = f"/predict/checksum?timeout_ms={source.randint(1, 10)}"
                counts[str((await ask(gateway.url, encode(image, path, Content_Type="image/png"))).status)] += 1
            else:
                async with await Connection.open(gateway.url) as connection:
                    await connection.send(encode(image, _PATH, Content_Type="image/png"))
                    await asyncio.sleep(source.uniform(0.0005, 0.010))
                    connection.abort()
                counts["hung up"] += 1

    with serving(triton, tmp_path, settings={"model": "checksum", "transport": transport, "log_level": "warning"}) as gateway:
        pids = gateway.pids()
        await asyncio.gather(*(give_up(seed) for seed in range(16)))
        await asyncio.sleep(_SETTLE_SECONDS)
        answer = await ask(gateway.url, encode(models.solid(1, 2, 3), Content_Type="image/png"))
        assert gateway.pids() == pids
    for what, count in sorted(counts.items()):
        record_figure(f"{_GIVE_UPS:,} give-ups, {transport}: {what}", count)

    assert answer.status == 200
    assert set(counts) <= {"200", "429", "503", "504", "hung up"}
    assert counts["504"] > 0
    assert triton.process.is_running()
    assert triton.process.create_time() == created


@asynccontextmanager
async def behind_nginx(repository: Path, folder: Path, **settings: object) -> AsyncIterator[tuple[Fleet, str]]:
    """Run two instances and the embedded Triton, and NGINX in front of them."""
    (folder / "nginx").mkdir()
    with running_fleet(repository, folder, settings=settings) as fleet:
        sockets = [f"unix:{socket}" for socket in fleet.sockets]
        with proxying(sockets, folder / "nginx") as proxy:
            yield fleet, proxy.local_url


async def test_every_answer_belongs_to_its_request(fault_repository: Path, tmp_path: Path, record_figure: RecordFigure) -> None:
    source = random.Random(2)  # noqa: S311 - not a secret
    ends: Counter[str] = Counter()

    async with behind_nginx(fault_repository, tmp_path) as (fleet, url):

        def kill_triton() -> None:
            triton = fleet.triton()
            if triton is not None:
                triton.kill()
                ends["Triton"] += 1

        def kill_worker() -> None:
            source.choice(fleet.workers()).kill()
            ends["worker"] += 1

        async def leave(seed: int) -> None:
            colours = random.Random(seed)  # noqa: S311 - not a secret
            while True:
                async with await Connection.open(url) as connection:
                    image = models.Checksum.draw(colours).image
                    await connection.send(encode(image, _PATH, Content_Type="image/png"))
                    await asyncio.sleep(colours.uniform(0.0005, 0.010))
                    connection.abort()
                await asyncio.sleep(0.05)

        leaving = (leave(100 + seed) for seed in range(4))
        async with meanwhile(*leaving, every(12, kill_triton), every(17, kill_worker)), traffic(url, clients=16) as counted:
            end = monotonic() + 1200
            while counted.statuses[200] < _ANSWERS:
                assert monotonic() < end, counted.statuses
                await asyncio.sleep(0.1)
    record_figure("crossed answers: Triton killed", ends["Triton"])
    record_figure("crossed answers: workers killed", ends["worker"])
    counted.record(record_figure, "crossed answers")

    assert set(counted.statuses) <= {200, 503}
    assert ends["Triton"] >= 3


async def test_workers_killed_for_five_minutes(fault_repository: Path, tmp_path: Path, record_figure: RecordFigure) -> None:
    source = random.Random(3)  # noqa: S311 - not a secret
    async with behind_nginx(fault_repository, tmp_path) as (fleet, url):
        async with traffic(url) as counted, meanwhile(every(_KILL_SECONDS, lambda: source.choice(fleet.workers()).kill())):
            await asyncio.sleep(_KILL_SECONDS * _KILLS + 1)
        restarts = fleet.says("restarting it")
    record_figure("five minutes of kills: workers killed", _KILLS)
    record_figure("five minutes of kills: instances restarted", restarts)
    counted.record(record_figure, "five minutes of kills")

    assert set(counted.statuses) == {200}


class Resources(NamedTuple):
    fds: int
    threads: int
    tasks: int
    shm: int


def read_resources(gateway: Gateway, folder: Path) -> Resources:
    """Count what the workers have in use, once they are idle."""
    tasks = 0
    for worker in gateway.workers():
        file = folder / f"tasks-{worker.pid}"
        file.unlink(missing_ok=True)
        os.kill(worker.pid, signal.SIGUSR2)
        wait_for(lambda file=file: file.exists() and file.read_text() != "")  # type: ignore[misc]
        tasks += int(file.read_text())
    threads = sum(worker.num_threads() for worker in gateway.workers())
    return Resources(gateway.fds(), threads, tasks, len(arenas_of(gateway.pids())))


async def measure_leaks(
    triton: Triton, folder: Path, requests: int, leak: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, Resources, Resources]:
    """Send requests, of which a fifth hang up; return the growth per 10,000 requests, MB, and what was in use before and after."""
    monkeypatch.setenv("OBSERVED_FOLDER", str(folder))
    monkeypatch.setenv("OBSERVED_LEAK", str(leak))
    done = 0
    samples: list[tuple[int, int]] = []

    async def ask_and_leave(seed: int, until: int) -> None:
        nonlocal done
        source = random.Random(seed)  # noqa: S311 - not a secret
        while done < until:
            async with await Connection.open(gateway.url) as connection:
                while done < until:
                    done += 1
                    if done % _SAMPLE_REQUESTS == 0:
                        samples.append((done, gateway.rss()))
                    checksum = models.Checksum.draw(source)
                    request = encode(checksum.image, _PATH, Content_Type="image/png")
                    if source.random() < _DISCONNECTS:
                        await connection.send(request)
                        await asyncio.sleep(source.uniform(0, 0.010))
                        connection.abort()
                        break
                    answer = await connection.ask(request)
                    assert answer.status in {200, 429}
                    assert answer.status == 429 or checksum.is_box(json.loads(answer.body)["detections"][0])

    settings = {"model": "checksum", "log_level": "warning"}
    with serving(triton, folder, program=("-c", _OBSERVED), settings=settings) as gateway:
        pids = gateway.pids()
        await asyncio.gather(*(ask_and_leave(seed, _WARM_UP) for seed in range(8)))
        await asyncio.sleep(_SETTLE_SECONDS)
        before = read_resources(gateway, folder)
        samples.clear()
        await asyncio.gather(*(ask_and_leave(seed, _WARM_UP + requests) for seed in range(8)))
        await asyncio.sleep(_SETTLE_SECONDS)
        after = read_resources(gateway, folder)
        assert gateway.pids() == pids
    counts, bytes_ = np.array(samples, float).T
    return float(np.polyfit(counts, bytes_, 1)[0]) * 10_000 / 1e6, before, after


async def test_gateway_leaks_no_memory_files_or_threads(
    triton: Triton, tmp_path: Path, record_figure: RecordFigure, monkeypatch: pytest.MonkeyPatch
) -> None:
    slope, before, after = await measure_leaks(triton, tmp_path, _REQUESTS, 0, monkeypatch)
    record_figure(f"soak of {_REQUESTS:,}: memory of both workers, MB per 10,000 requests", slope, _MAX_SLOPE_MB)
    for name, was, is_ in zip(Resources._fields, before, after, strict=True):
        record_figure(f"soak of {_REQUESTS:,}: {name} more or less than before", abs(is_ - was), 2)


async def test_a_leak_is_found(
    triton: Triton, tmp_path: Path, record_figure: RecordFigure, monkeypatch: pytest.MonkeyPatch
) -> None:
    slope, _, _ = await measure_leaks(triton, tmp_path, _LEAK_REQUESTS, 512, monkeypatch)
    record_figure("soak with a leak of 512 bytes: memory of both workers, MB per 10,000 requests", slope)

    assert slope > _MAX_SLOPE_MB
