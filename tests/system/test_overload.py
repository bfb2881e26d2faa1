"""More requests than a model can answer, with real processes: some are answered, the others are told when to come back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, eventually, scrape
from tests.system.gateway import RunningGateway, running_gateway

LIMIT = 4


@asynccontextmanager
async def calling(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as client:
        yield client


def connections(worker: psutil.Process, port: int) -> int:
    """Count the connections of clients that a worker handles."""
    return sum(used.laddr.port == port and used.status == psutil.CONN_ESTABLISHED for used in worker.net_connections("tcp"))


async def until_each_worker_knows_the_other(gateway: RunningGateway) -> None:
    """Ask over several connections, until both workers have been asked and have told of both."""
    async with asyncio.timeout(60):
        asked: set[int] = set()
        while len(asked) < 2:
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(calling(gateway)) for _ in range(8)]
                told = await asyncio.gather(*map(scrape, clients))
                if all(found["api_workers"] == 2 for found in told):
                    asked |= {worker.pid for worker in gateway.workers() if connections(worker, gateway.port)}


async def test_the_workers_of_a_host_share_one_limit(tmp_path: Path) -> None:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    async with (
        serving(fake),
        running_gateway(fake.url, tmp_path, workers=2, max_requests=LIMIT, calls_in_flight=100, timeout_seconds=60) as gateway,
        calling(gateway) as client,
    ):
        await until_each_worker_knows_the_other(gateway)
        fake.most_running = 0
        for _ in range(2):
            fake.may_answer.clear()
            asking = [asyncio.create_task(client.post("/detect", content=SCENE)) for _ in range(40)]
            await eventually(lambda: sum(task.done() for task in asking) == 40 - LIMIT)  # noqa: B023 - at once
            await eventually(lambda: fake.running == LIMIT)
            fake.may_answer.set()
            statuses = Counter(response.status_code for response in await asyncio.gather(*asking))

            assert statuses == {200: LIMIT, 429: 40 - LIMIT}
        assert fake.most_running == LIMIT
