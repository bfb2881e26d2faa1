"""The metrics of real processes: any worker of any instance tells what all of them have done, also those that have ended."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from tritonclient.grpc import service_pb2 as messages

from tests.fakes.triton import FakeTriton, serving
from tests.faults.serving import Gateway, running_gateway
from tests.processes import require_program
from tests.support import SCENE, Samples, eventually, read_samples

REQUESTS = 160
TARGETS = (
    ("POST", "/detect", "/detect", SCENE, 200),
    ("POST", "/v1/detect", "/v1/detect", SCENE, 200),
    ("POST", "/predict/tiny", "/predict/{model}", SCENE, 200),
    ("POST", "/detect", "/detect", b"no image", 415),
    ("POST", "/detect", "/detect", SCENE[:-100], 422),
    ("POST", "/detect?confidence=7", "/detect", SCENE, 400),
    ("GET", "/nothing/here", "unmatched", b"", 404),
    ("GET", "/livez", "/livez", b"", 200),
)
"""Method, path, endpoint, content and the status of the response."""


@asynccontextmanager
async def gateway(folder: Path, **settings: object) -> AsyncIterator[tuple[FakeTriton, Gateway]]:
    fake = FakeTriton().find_nothing()
    async with serving(fake), running_gateway(fake.url, folder, workers=2, **settings) as running:
        yield fake, running


async def scrape(url: str) -> Samples:
    """Read the metrics over a connection of its own, so that any worker may answer."""
    async with httpx.AsyncClient(timeout=60) as client:
        return read_samples((await client.get(f"{url}/metrics")).text)


async def load(url: str, connections: int = 8) -> Counter[tuple[str, str]]:
    """Send requests of all kinds over several connections; return how many were answered, by endpoint and status."""
    counts: Counter[tuple[str, str]] = Counter()
    left = iter(range(REQUESTS))

    async def send() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for number in left:
                method, path, endpoint, content, status = TARGETS[number % len(TARGETS)]
                answer = await client.request(method, path, content=content, headers={"content-type": "image/bmp"})
                assert answer.status_code == status, answer.text
                counts[endpoint, str(status)] += 1

    await asyncio.gather(*(send() for _ in range(connections)))
    return counts


def requests(samples: Samples) -> Counter[tuple[str, str]]:
    """Return how many requests the metrics count, by endpoint and status, without those for the metrics themselves."""
    return Counter(
        {
            (endpoint, status): int(samples.get(f'api_requests_total{{endpoint="{endpoint}",status="{status}"}}', 0))
            for endpoint, status in {(endpoint, str(status)) for _, _, endpoint, _, status in TARGETS}
        }
    )


async def test_counts_of_a_killed_worker_remain(tmp_path: Path) -> None:
    async with gateway(tmp_path, calls_in_flight=100) as (fake, running), AsyncExitStack() as stack:
        before = requests(await scrape(running.url))
        counts = await load(running.url)
        fake.may_answer.clear()
        clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=60)) for _ in range(8)]
        stalled = [asyncio.create_task(client.post("/detect", content=SCENE)) for client in clients]
        await eventually(lambda: fake.running == 8)
        (killed, _) = running.workers()
        killed.kill()
        await eventually(lambda: len(running.workers()) == 2 and killed not in running.workers())
        fake.may_answer.set()
        answers = await asyncio.gather(*stalled, return_exceptions=True)
        counts["/detect", "200"] += sum(isinstance(answer, httpx.Response) for answer in answers)

        found: Samples = {}
        while [found.get(f"api_{name}") for name in ("active_requests", "workers", "worker_starts_total")] != [1, 2, 3]:
            found = await scrape(running.url)
        assert requests(found) - before == counts


async def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    """But for the names with `ms`, which are those that dashboards of Triton gateways know."""
    async with gateway(tmp_path) as (fake, running):
        counted = fake.statistics.model_stats.add(name="tiny", version="1", inference_count=8, execution_count=2)
        counted.inference_stats.queue.MergeFrom(messages.StatisticDuration(count=4, ns=4_000_000))
        counted.inference_stats.compute_infer.MergeFrom(messages.StatisticDuration(count=4, ns=20_000_000))
        await load(running.url)
        text = b""
        async with httpx.AsyncClient() as client:
            while b"triton_queue_time_ms{" not in text:  # the host reads Triton's statistics every 5 s
                text = (await client.get(f"{running.url}/metrics")).content

    command = [require_program("promtool", "prometheus"), "check", "metrics"]
    said = subprocess.run(command, input=text, capture_output=True, check=False).stderr.decode()  # noqa: ASYNC221
    assert {line.split()[0] for line in said.splitlines()} == {"triton_queue_time_ms", "triton_inference_time_ms"}
