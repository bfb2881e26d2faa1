"""A second version of a model from its first request to its last step, beside the first one, in a gateway as a user runs it."""

import asyncio
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import httpx
import numpy as np

from app.api.caller import keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, json
from tests.system.gateway import running_gateway

NAME = "detector"


class Versions(FakeTriton):
    """Has a model in some versions, and may fail every second inference of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.model_versions = ["2"]
        self.answer = infer_response(output0=np.array([[0, 0, 8, 8, 0.75, 1], [2, 2, 6, 6, 0.5, 0]], np.float32))
        self.is_sick = False
        self.third_at: list[float] = []
        """When the third version was asked, as of `time.monotonic`."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.model_version == "3":
            self.third_at.append(monotonic())
            if self.is_sick and len(self.third_at) % 2:
                await context.abort(grpc.StatusCode.INTERNAL, "onnx runtime error 6: the weights are not those of this model")
        return await super().ModelInfer(request, context)


class Caller:
    """Asks a route, and changes it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def put(self, **route: object) -> None:
        """Change the route, and wait until all workers follow."""
        json(await self.client.put(f"/routes/{NAME}", json=route))
        await asyncio.sleep(1.5)

    async def ask(self, requests: int = 1) -> Counter[str]:
        """Return the versions that answer requests, of which a few are under way at a time; all are answered."""
        limit = asyncio.Semaphore(8)

        async def one() -> str:
            async with limit:
                return str(json(await self.client.post(f"/detect?model={NAME}", content=SCENE))["model"]["version"])

        return Counter(await asyncio.gather(*(one() for _ in range(requests))))

    async def withdrawn(self) -> str:
        return str(json(await self.client.get("/health"))["routes"][NAME]["withdrawn"])


async def test_a_canary_that_fails_is_gone_and_the_next_one_is_promoted(tmp_path: Path) -> None:
    """Nobody gets an error meanwhile. Of two workers, each sees half of its failures; a restart changes nothing."""
    fake, (file, key_file) = Versions(), (tmp_path / name for name in ("routes.toml", "keys.toml"))
    credential, table = keys.create("operator")
    key_file.write_text(table.replace('"detect"', '"detect", "health", "admin"'), encoding="utf-8")
    settings = {"workers": 2, "routes_file": file, "api_keys_file": key_file}
    headers = {"X-API-Key": credential}

    async with serving(fake):
        async with running_gateway(fake.url, tmp_path, **settings) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client:
                caller = Caller(client)
                await caller.put(to="tiny:2")
                assert await caller.ask(20) == {"2": 20}
                fake.model_versions.append("3")
                await caller.put(to="tiny:2", canary={"to": "tiny:3", "share": 0.05})
                assert (await caller.ask(400))["3"] in {19, 20}  # each worker counts its own
                assert await caller.withdrawn() == ""

                fake.is_sick = True
                asked = 0
                while not await caller.withdrawn():
                    asked += sum((await caller.ask(100)).values())
                    assert asked < 20_000
                gone_after = monotonic() - fake.third_at[49]
                assert gone_after < 10
                await asyncio.sleep(1.5)
                before = len(fake.third_at)
                assert await caller.ask(200) == {"2": 200}
                assert len(fake.third_at) == before
        async with running_gateway(fake.url, tmp_path, **settings) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client:
                caller = Caller(client)
                assert "requests in a minute failed" in await caller.withdrawn()
                assert await caller.ask(200) == {"2": 200}

                fake.is_sick = False
                await caller.put(to="tiny:3")
                assert await caller.ask(50) == {"3": 50}
                assert await caller.withdrawn() == ""
    assert file.read_text(encoding="utf-8").endswith('\n[detector]\nto = "tiny:3"\n')
