"""Routes of a gateway with several workers: it runs, its routes change, and no request fails."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import numpy as np

from tests.api.conftest import write_keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.faults.serving import running_gateway
from tests.support import SCENE, until
from tests.system.test_routes import FOLLOW_SECONDS

WORKERS, CLIENTS, REQUESTS = 2, 8, 2000
ADMIN, CAMERA = {"X-API-Key": "boss.secret"}, {"X-API-Key": "camera.secret"}


async def test_all_workers_follow_a_route_and_share_exactly(tmp_path: Path) -> None:
    fake = FakeTriton()
    fake.model_versions = ["1", "2", "3"]
    fake.index = [("tiny", "1", "READY", "")]
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    file = tmp_path / "routes.toml"
    file.write_text('[detector]\nto = "tiny:1"\n')
    keys = write_keys(tmp_path, ("boss", "secret", "admin"), ("camera", "secret", "detect"))
    settings = {"model": "detector", "routes_file": file, "api_keys_file": keys}

    async with serving(fake), running_gateway(fake.url, tmp_path, workers=WORKERS, **settings) as gateway:

        async def ask(client: httpx.AsyncClient) -> str:
            answer = await client.post("/detect", content=SCENE, headers=CAMERA)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["model"]["version"])

        async def ask_anew(_: object = None) -> str:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                return await ask(client)

        async def versions() -> set[str]:
            return set(await asyncio.gather(*map(ask_anew, range(16))))

        async def put(**route: object) -> None:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                answer = await client.put("/routes/detector", json=route, headers=ADMIN)
                assert answer.status_code == 200, answer.text

        async def follow() -> bool:
            return await versions() == {"2"}

        assert await versions() == {"1"}
        await put(to="tiny:2")
        await until(follow)
        file.write_text("[detector")
        await asyncio.sleep(FOLLOW_SECONDS)
        assert await versions() == {"2"}
        file.write_text('[detector]\nto = "tiny:2"\n')
        await asyncio.sleep(FOLLOW_SECONDS)
        assert await versions() == {"2"}
        await put(to="tiny:2", canary={"to": "tiny:3", "share": 0.2})
        await asyncio.sleep(FOLLOW_SECONDS)
        left = iter(range(REQUESTS))

        async def keep_asking() -> Counter[str]:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                return Counter([await ask(client) for _ in left])

        answered = sum(await asyncio.gather(*(keep_asking() for _ in range(CLIENTS))), Counter())

    assert answered.total() == REQUESTS
    assert abs(answered["3"] - 0.2 * REQUESTS) <= WORKERS
    assert answered["2"] == REQUESTS - answered["3"]
