"""The newest frame of a camera takes the place of the one that waits, whichever worker has it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.serving import gateway_to, unharmed
from tests.processes import PATIENCE_SECONDS
from tests.support import scrape, until

_IMAGE = models.solid(1, 2, 3)


@pytest.mark.system
async def test_newer_frame_takes_the_place_of_one_that_waits(triton: Triton, tmp_path: Path) -> None:
    """The model has one place, which a single request holds. Connections are not kept, so that any worker may get the next one."""
    settings = {"model": "faulty", "max_requests": 1, "timeout_seconds": PATIENCE_SECONDS}
    with gateway_to(triton, tmp_path, **settings) as gateway, unharmed(gateway):
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_SECONDS, limits=limits) as client:

            def send(stream: str, path: str = "/detect", **files: Any) -> asyncio.Task[httpx.Response]:  # noqa: ANN401
                content: Any = {"files": files} if files else {"content": _IMAGE}
                return asyncio.create_task(client.post(path, headers={"X-Stream": stream} if stream else {}, **content))

            async def is_at(number: int, metric: str = "waiting_requests") -> bool:
                samples = await scrape(client)
                return samples.get(f'api_model_{metric}{{model="faulty"}}', 0) == number

            assert (await send("a name")).json()["code"] == "invalid_parameter"
            async with models.faulty(triton.repository, "hang"):
                single = send("")
                await until(lambda: is_at(1, "active_requests"))
                left, yard, newest = send("gate"), send("yard"), send("door")
                await until(lambda: is_at(3))
                left.cancel()  # its client leaves
                await until(lambda: is_at(2))
                for number in range(8):
                    older = newest
                    newest = send("door", "/v1/vision/detection", image=_IMAGE) if number % 2 else send("door")
                    superseded = await older
                    assert superseded.status_code == 409
                    assert ("error" if number and number % 2 == 0 else "code") in superseded.json()
                    await until(lambda: is_at(2))
                assert (await send("")).status_code == 429  # no other single request has a place
            assert [(await answer).status_code for answer in (single, yard, newest)] == [200] * 3

            async def is_free() -> bool:
                samples = await scrape(client)
                return not samples['api_reserved_bytes{purpose="images"}'] and await is_at(0) and await is_at(0, "active_requests")

            await until(is_free)
            samples = await scrape(client)
            assert samples['api_requests_total{endpoint="/detect",status="409"}'] == 5
            assert samples['api_errors_total{code="superseded"}'] == 8
