"""A second version of a model from its first image to the last request for the first one, in a gateway as a user runs it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np

from app.api.caller import keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.faults.serving import Gateway, running_gateway
from tests.processes import run_nereid
from tests.support import SCENE, json

NAME = "detector"
FOLLOW_SECONDS = 3
"""A worker looks again with the first request a second after its last look, however busy the machine is."""
ROWS = np.array([[2, 10, 12, 20, 0.75, 1], [16, 10, 28, 20, 0.5, 0]], np.float32)


class Versions(FakeTriton):
    """Has a model in some versions, of which the third finds less, and may fail every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.model_versions = ["2"]
        self.answer = infer_response(output0=ROWS)
        self.is_sick = False
        self.asked_third = 0

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        answer = await super().ModelInfer(request, context)
        if request.model_version == "3" and request.id != "unit":
            self.asked_third += 1
            if self.is_sick and self.asked_third % 2:
                await context.abort(grpc.StatusCode.INTERNAL, "onnx runtime error 6: the weights are not those of this model")
            answer.raw_output_contents[0] = (ROWS * [[1], [0]]).astype(np.float32).tobytes()
        return answer


class Operator:
    def __init__(self, gateway: Gateway, client: httpx.AsyncClient, key_file: Path) -> None:
        self.gateway, self.client, self.key_file = gateway, client, key_file

    async def put(self, **route: object) -> None:
        """Change the route, and wait until all workers follow."""
        json(await self.client.put(f"/routes/{NAME}", json=route))
        await asyncio.sleep(FOLLOW_SECONDS)

    async def ask(self, requests: int, at_once: int = 8) -> Counter[str]:
        """Return the versions that answer requests; all are answered."""
        limit = asyncio.Semaphore(at_once)

        async def one() -> str:
            async with limit:
                return str(json(await self.client.post(f"/detect?model={NAME}", content=SCENE))["model"]["version"])

        return Counter(await asyncio.gather(*(one() for _ in range(requests))))

    async def withdrawn(self) -> str:
        return str(json(await self.client.get("/health"))["withdrawn_canaries"].get(NAME, ""))

    async def compare(self) -> list[str]:
        done = await asyncio.to_thread(run_nereid, "compare", NAME, "--key-file", self.key_file, port=self.gateway.port)
        assert not done.returncode, done.stderr
        return done.stdout.splitlines()


@asynccontextmanager
async def operated(fake: FakeTriton, folder: Path) -> AsyncIterator[Operator]:
    files = {"routes_file": folder / "routes.toml", "api_keys_file": folder / "keys.toml"}
    headers = {"X-API-Key": (folder / "key").read_text(encoding="utf-8")}
    async with (
        running_gateway(fake.url, folder, workers=2, **files) as gateway,
        httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=30) as client,
    ):
        yield Operator(gateway, client, folder / "key")


async def test_a_version_is_compared_tried_withdrawn_and_after_it_is_mended_promoted(tmp_path: Path) -> None:
    credential, table = keys.create("operator")
    (tmp_path / "key").write_text(credential, encoding="utf-8")
    (tmp_path / "keys.toml").write_text(table.replace('"detect"', '"detect", "health", "admin"'), encoding="utf-8")
    fake = Versions()

    async with serving(fake):
        async with operated(fake, tmp_path) as operator:
            await operator.put(to="tiny:2")
            assert await operator.ask(20) == {"2": 20}

            fake.model_versions.append("3")
            await operator.put(to="tiny:2", shadow={"to": "tiny:3", "share": 0.1})
            assert await operator.ask(200, at_once=1) == {"2": 200}
            title, _, figures, *_ = await operator.compare()
            while not title.endswith((" 19 images", " 20 images")):  # each worker counts its own
                title, _, figures, *_ = await operator.compare()
            compared = fake.asked_third
            assert title.startswith(f"{NAME}: tiny:3 ")
            assert title.endswith(f" {compared} images")
            assert figures.split()[:5] == ["all", str(2 * compared), "50.0%", str(compared), "0"]

            fake.asked_third = 0
            await operator.put(to="tiny:2", canary={"to": "tiny:3", "share": 0.05})
            assert (await operator.ask(400))["3"] in {19, 20}
            assert await operator.withdrawn() == ""
            fake.is_sick = True
            while not await operator.withdrawn():
                assert fake.asked_third < 500
                await operator.ask(100)
            await asyncio.sleep(FOLLOW_SECONDS)
            fake.asked_third = 0
            assert await operator.ask(200) == {"2": 200}

        async with operated(fake, tmp_path) as operator:
            assert "requests in a minute failed" in await operator.withdrawn()
            assert await operator.ask(200) == {"2": 200}
            assert not fake.asked_third
            fake.is_sick = False
            await operator.put(to="tiny:3")
            assert await operator.ask(50) == {"3": 50}
            assert await operator.withdrawn() == ""
    assert (tmp_path / "routes.toml").read_text(encoding="utf-8").endswith('\n[detector]\nto = "tiny:3"\n')
