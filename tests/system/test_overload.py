"""More requests than a model can answer, with real processes: some are answered, the others are told when to come back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from bench.harness.triton import Triton, embedded_triton
from bench.models.repository import write_fixture
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.scrape import scrape
from tests.support import SCENE, eventually
from tests.system.gateway import RunningGateway, running_gateway

MODEL = "wait_20"
LIMIT = 4


@asynccontextmanager
async def calling(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    """Make a client with any number of connections."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as client:
        yield client


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    """Ask for a detection."""
    return await client.post("/detect", content=SCENE)


@pytest.fixture(scope="module")
def waiting_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A real Triton with a model that answers 20 images a second."""
    repository = tmp_path_factory.mktemp("models")
    write_fixture(MODEL, repository)
    with embedded_triton(repository, MODEL) as triton:
        yield triton


async def test_what_cannot_be_answered_is_rejected_and_the_rest_is_answered(waiting_triton: Triton, tmp_path: Path) -> None:
    """40 requests at once, four at a time: some 200, all others 429 that say when to come back; afterwards there is room."""
    settings = {"workers": 2, "model": MODEL, "max_requests": LIMIT}
    async with running_gateway(waiting_triton.settings.triton_url, tmp_path, **settings) as gateway, calling(gateway) as client:
        responses = await asyncio.gather(*(ask(client) for _ in range(40)))
        statuses = Counter(response.status_code for response in responses)
        rejected = [response for response in responses if response.status_code == 429]

        assert set(statuses) == {200, 429}
        assert statuses[200] >= LIMIT
        assert {response.json()["code"] for response in rejected} == {"gateway_full"}
        assert all(int(response.headers["retry-after"]) >= 1 for response in rejected)
        assert (await ask(client)).status_code == 200


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


@asynccontextmanager
async def stalled(folder: Path) -> AsyncIterator[tuple[FakeTriton, RunningGateway, httpx.AsyncClient]]:
    """Run a gateway of two workers on a Triton that does not answer until it may."""
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    async with (
        serving(fake),
        running_gateway(fake.url, folder, workers=2, max_requests=LIMIT, timeout_seconds=60) as gateway,
        calling(gateway) as client,
    ):
        await until_each_worker_knows_the_other(gateway)
        fake.may_answer.clear()
        fake.most_running = 0
        try:
            yield fake, gateway, client
        finally:
            fake.may_answer.set()


async def test_the_workers_of_a_host_share_one_limit(tmp_path: Path) -> None:
    """However 40 requests at once are distributed, four of them reach Triton, and four more once those have been answered."""
    async with stalled(tmp_path) as (fake, _, client):
        for _ in range(2):
            asking = [asyncio.create_task(ask(client)) for _ in range(40)]
            assert await eventually(lambda: sum(task.done() for task in asking) == 40 - LIMIT)  # noqa: B023 - at once
            assert await eventually(lambda: fake.running == LIMIT)
            fake.may_answer.set()
            statuses = Counter(response.status_code for response in await asyncio.gather(*asking))
            fake.may_answer.clear()

            assert statuses == {200: LIMIT, 429: 40 - LIMIT}
        assert fake.most_running == LIMIT


async def test_clients_that_leave_give_their_places_back_when_triton_has_ended(tmp_path: Path) -> None:
    """Triton goes on working for them, so until then further requests are rejected; the log says 499."""
    async with stalled(tmp_path) as (fake, _, client):
        asking = [asyncio.create_task(ask(client)) for _ in range(LIMIT)]
        assert await eventually(lambda: fake.running == LIMIT)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        log = tmp_path / "gateway.log"
        assert await eventually(lambda: log.read_text().count('"status":499') == LIMIT)
        assert fake.running == LIMIT
        assert (await ask(client)).status_code == 429
        fake.may_answer.set()

        async with asyncio.timeout(60):  # the gateway learns of it a moment later
            while (await scrape(client))['api_model_active_requests{model="tiny"}']:
                pass
        assert {response.status_code for response in await asyncio.gather(*(ask(client) for _ in range(LIMIT)))} == {200}
    assert fake.cancelled == 0


async def test_a_killed_worker_leaves_its_places_to_the_other(tmp_path: Path) -> None:
    """The requests that it was working for do not count any more, and the host has its whole capacity again."""
    async with stalled(tmp_path) as (fake, gateway, client):
        asking = [asyncio.create_task(ask(client)) for _ in range(LIMIT)]
        assert await eventually(lambda: fake.running == LIMIT)
        fake.requests.clear()
        max(gateway.workers(), key=lambda worker: connections(worker, gateway.port)).kill()
        assert await eventually(lambda: fake.running < LIMIT)
        async with asyncio.timeout(60):
            while (before := fake.running) < LIMIT:
                asking.append(asyncio.create_task(ask(client)))
                await eventually(lambda: asking[-1].done() or fake.running > before)
        # The worker that takes the place of the killed one warms up, which counts as a request, too.
        warming_up = sum(request.id == "warm-up" for request in fake.requests)
        fake.may_answer.set()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)

        statuses = Counter(outcome.status_code for outcome in outcomes if isinstance(outcome, httpx.Response))
        assert statuses[200] == LIMIT - warming_up
        assert set(statuses) <= {200, 429}
        assert all(isinstance(outcome, httpx.Response | httpx.TransportError) for outcome in outcomes)
