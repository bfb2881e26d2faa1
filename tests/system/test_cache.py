"""The cache of a real `serve`, whose models change meanwhile: each answer is that of the network that Triton runs by then."""

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.faults.meanwhile import meanwhile
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import SCENE
from tests.system.test_model_versions import CLIENTS, SWITCH_SECONDS, Service, Traffic, service

IMAGES = [SCENE + bytes(number) for number in range(20)]


def ask(serving: Service, image: bytes = SCENE, **headers: str) -> tuple[str, str]:
    """Return how the cache has answered, and the object that was found, which tells the network."""
    response = httpx.post(f"{serving.url}/predict/doors", content=image, headers=headers, timeout=30)
    (found,) = json.loads(response.content)["detections"]
    return response.headers.get("x-cache", ""), found["class_name"]


async def until_hit(serving: Service, network: str) -> None:
    """Wait until the cache answers an image with what this network finds."""
    for _ in range(int(SWITCH_SECONDS * 20)):
        if await asyncio.to_thread(ask, serving) == ("hit", network):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"the cache does not answer with {network}")


@pytest.mark.timeout(300)  # commands run while the clients take most of the CPU time
async def test_no_answer_is_that_of_another_network(tmp_path: Path) -> None:
    with service(tmp_path, instances=1, cache="memory") as serving:
        await asyncio.to_thread(serving.add, 1)
        await until_hit(serving, "version 1")
        traffic = Traffic(serving.url)
        async with meanwhile(*(traffic.run_client() for _ in range(CLIENTS))):
            await asyncio.to_thread(serving.add, 2)
            await traffic.wait_for(2)
            await asyncio.to_thread(serving.run, "use", "doors:1")
            await traffic.wait_for(1)
        assert traffic.statuses.keys() == {200}

        networks = {number: serving.repository / "doors" / str(number) / "model.onnx" for number in (1, 2)}
        kept = {number: Path(shutil.copy(path, tmp_path / f"{number}.kept")) for number, path in networks.items()}
        await until_hit(serving, "version 1")
        shutil.copy(kept[2], networks[1])
        await asyncio.sleep(SWITCH_SECONDS)
        assert await asyncio.to_thread(ask, serving) == ("", "version 1")  # Triton has not loaded the change
        await asyncio.to_thread(serving.run, "load", "doors")
        await until_hit(serving, "version 2")
        assert Counter([ask(serving, image)[1] for image in IMAGES]) == {"version 2": len(IMAGES)}
        await asyncio.to_thread(serving.run, "cache", "clear")
        await asyncio.sleep(SWITCH_SECONDS)
        assert await asyncio.to_thread(ask, serving) == ("miss", "version 2")
