"""Many requests, for long: nothing is lost, mixed up or leaked."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from bench.harness.triton import Triton
from tests.bench.support import arenas_of
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection, encode
from tests.faults.fleet import running_fleet
from tests.faults.meanwhile import every, meanwhile
from tests.faults.serving import serving
from tests.faults.traffic import traffic
from tests.nginx import proxying

pytestmark = pytest.mark.soak

_ANSWERS = 50_000
_REQUESTS, _WARM_UP = 100_000, 20_000
_GIVE_UPS = 0.2
_SETTLE_SECONDS = 8.0
_PATH = "/predict/checksum?boxes=pixel"


async def leave(url: str, request: bytes, source: random.Random) -> None:
    """Send a request, and hang up at any time before its answer."""
    async with await Connection.open(url) as connection:
        await connection.send(request)
        await asyncio.sleep(source.uniform(0, 0.010))
        connection.abort()


async def test_every_answer_belongs_to_its_request(fault_repository: Path, tmp_path: Path, record_figure: RecordFigure) -> None:
    source = random.Random(2)  # noqa: S311 - not a secret
    ends: Counter[str] = Counter()
    (tmp_path / "nginx").mkdir()
    with (
        running_fleet(fault_repository, tmp_path) as fleet,
        proxying([f"unix:{socket}" for socket in fleet.sockets], tmp_path / "nginx") as proxy,
    ):

        def kill_triton() -> None:
            if triton := fleet.triton():
                triton.kill()
                ends["Triton"] += 1

        def kill_worker() -> None:
            source.choice(fleet.workers()).kill()
            ends["worker"] += 1

        async def keep_leaving() -> None:
            while True:
                await leave(proxy.local_url, encode(models.Checksum.draw(source).image, _PATH, Content_Type="image/png"), source)
                await asyncio.sleep(0.05)

        leaving = [keep_leaving() for _ in range(4)]
        async with (
            meanwhile(*leaving, every(12, kill_triton), every(17, kill_worker)),
            traffic(proxy.local_url, clients=16) as counted,
        ):
            end = monotonic() + 1200
            while counted.statuses[200] < _ANSWERS:
                assert monotonic() < end, counted.statuses
                await asyncio.sleep(0.1)
    for name, count in ends.items():
        record_figure(f"crossed answers: {name} killed", count)
    counted.record(record_figure, "crossed answers")

    assert set(counted.statuses) <= {200, 503}
    assert ends["Triton"] >= 3


async def test_gateway_leaks_no_memory_files_or_threads(triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """A fifth of the clients hang up, and another fifth give up after milliseconds, from which an older Triton dies."""
    created = triton.process.create_time()
    done, statuses = 0, Counter[int]()
    samples: list[tuple[int, int]] = []

    async def call(seed: int, until: int) -> None:
        nonlocal done
        source = random.Random(seed)  # noqa: S311 - not a secret
        async with await Connection.open(gateway.url) as connection:
            while done < until:
                done += 1
                if done % 1_000 == 0:
                    samples.append((done, gateway.rss()))
                checksum, kind = models.Checksum.draw(source), source.random()
                deadline = f"&timeout_ms={source.randint(1, 10)}" if kind > 1 - _GIVE_UPS else ""
                request = encode(checksum.image, _PATH + deadline, Content_Type="image/png")
                if kind < _GIVE_UPS:
                    await leave(gateway.url, request, source)
                else:
                    answer = await connection.ask(request)
                    statuses[answer.status] += 1
                    assert answer.status != 200 or checksum.is_box(json.loads(answer.body)["detections"][0])

    async def send(until: int) -> dict[str, int]:
        """Send so many requests in all; return what the workers have in use when they are idle again."""
        await asyncio.gather(*(call(seed, until) for seed in range(8)))
        await asyncio.sleep(_SETTLE_SECONDS)
        threads = sum(worker.num_threads() for worker in gateway.workers())
        return {"files": gateway.fds(), "threads": threads, "arenas": len(arenas_of(gateway.pids()))}

    with serving(triton, tmp_path, settings={"model": "checksum", "log_level": "warning"}) as gateway:
        pids = gateway.pids()
        before = await send(_WARM_UP)
        samples.clear()
        after = await send(_WARM_UP + _REQUESTS)
        assert gateway.pids() == pids
    counts, bytes_ = np.array(samples, float).T
    slope = float(np.polyfit(counts, bytes_, 1)[0]) * 10_000 / 1e6
    record_figure(f"soak of {_REQUESTS:,}: memory of both workers, MB per 10,000 requests", slope, 1)
    for name, was in before.items():
        record_figure(f"soak of {_REQUESTS:,}: {name} more or less than before", abs(after[name] - was), 2)

    assert {200, 504} <= set(statuses) <= {200, 429, 503, 504}
    assert (triton.process.is_running(), triton.process.create_time()) == (True, created)
