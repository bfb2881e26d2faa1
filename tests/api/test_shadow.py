"""Shadows over HTTP: after the answer, and with a folder for pictures that only the operator chooses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest

from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.scrape import read_samples
from tests.support import SCENE, calling, eventually, json, lifespan_of, until

ADMIN, CAMERA, MONITOR = ({"X-API-Key": f"{name}.secret"} for name in ("boss", "camera", "monitor"))


class Service(NamedTuple):
    """An application with a route `door` to `tiny`, whose shadow is `big`, and a client."""

    fake: FakeTriton
    client: httpx.AsyncClient
    folder: str

    async def has_compared(self, images: int) -> bool:
        samples = read_samples((await self.client.get("/metrics", headers=MONITOR)).text)
        return samples.get('api_shadow_images_total{model="big",result="compared",route="door"}') == images


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    fake, file, folder = FakeTriton(), tmp_path / "routes.toml", str(tmp_path)
    file.write_text(f'[door]\nto = "tiny"\nshadow = {{to = "big", share = 1.0, keep = "{folder}"}}\n', encoding="utf-8")
    fake.answer = infer_response(output0=np.array([[0, 8, 16, 24, 0.75, 1], [0, 0, 0, 0, 0, 0]], np.float32))
    fake.index = [("tiny", "1", "READY", ""), ("big", "1", "READY", "")]
    async with serving(fake):
        keys = write_keys(tmp_path, ("boss", "secret", "admin"), ("camera", "secret", "detect"), ("monitor", "secret", "health"))
        app = create_app(settings_for(fake.url, routes_file=str(file), api_keys_file=keys))
        async with lifespan_of(app), calling(app) as client:
            yield Service(fake, client, folder)
            fake.may_answer.set()


async def test_an_answer_does_not_wait_for_the_shadow(service: Service) -> None:
    fake = service.fake
    fake.held = {"first-shadow"}
    fake.may_answer.clear()
    answer = await service.client.post("/detect?model=door", content=SCENE, headers={"X-Request-Id": "first", **CAMERA})

    assert json(answer)["model"]["name"] == "tiny"
    await eventually(lambda: [request.id for request in fake.requests][-2:] == ["first", "first-shadow"])
    fake.may_answer.set()
    await until(lambda: service.has_compared(1))


async def test_a_folder_for_pictures_is_neither_shown_nor_chosen_over_http(service: Service) -> None:
    (route,) = json(await service.client.get("/routes", headers=CAMERA)).values()
    assert "keep" not in route["shadow"]

    route["shadow"]["share"] = 0.5
    answer = await service.client.put("/routes/door", json=route, headers=ADMIN)
    assert json(answer) == route
    assert f'keep = "{service.folder}"' in await asyncio.to_thread(Path(service.folder, "routes.toml").read_text)

    route["shadow"]["keep"] = service.folder
    for name in ("door", "gate"):
        answer = await service.client.put(f"/routes/{name}", json=route, headers=ADMIN)
        assert answer.status_code == 400
        assert "only be named in the routes file" in answer.text
