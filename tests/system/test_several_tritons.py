"""Two real Tritons behind one gateway, of which one dies and comes back."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import SCENE, json, started, triton_home

CLIENTS = 8
MODEL = "six_columns"


@pytest.fixture
def other(settings: Settings, tmp_path: Path) -> Iterator[tuple[Settings, EmbeddedTriton]]:
    """A second Triton, which the test may stop; it has one model, so that it starts soon."""
    shutil.copytree(Path(settings.model_repository, MODEL), tmp_path / MODEL)
    (tmp_path / "home").mkdir()
    home = triton_home(tmp_path / "home")
    own = msgspec.structs.replace(settings, model_repository=str(tmp_path), model=MODEL, triton_home=home)
    server = EmbeddedTriton(own)
    server.start()
    yield own, server
    server.stop()


async def detect_until(client: httpx.AsyncClient, event: Callable[[], Awaitable[object]]) -> list[int]:
    """Let clients ask one image after the other until something has happened, and once more; return the statuses."""
    statuses: list[int] = []
    happened = asyncio.Event()

    async def ask() -> None:
        is_last = False
        while not is_last:
            is_last = happened.is_set()
            statuses.append((await client.post("/detect", content=SCENE)).status_code)

    asking = [asyncio.create_task(ask()) for _ in range(CLIENTS)]
    await event()
    happened.set()
    await asyncio.gather(*asking)
    return statuses


async def tritons(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Read the state of each Triton from /health."""
    return list(json(await client.get("/health"))["tritons"])


async def until(client: httpx.AsyncClient, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until a condition holds for the state of the Tritons."""
    for _ in range(300):
        if holds(await tritons(client)):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(await tritons(client))


async def test_callers_do_not_notice_that_one_of_two_tritons_dies(
    settings: Settings, triton: EmbeddedTriton, other: tuple[Settings, EmbeddedTriton]
) -> None:
    """What it has not answered goes to the other one; as soon as it is there again, it gets its part."""
    assert triton.poll() is None
    own, server = other
    both = msgspec.structs.replace(
        settings,
        triton_endpoints=f"{settings.triton_address}, {own.triton_address}",
        model=MODEL,
    )
    async with started(create_app(both)) as client:

        async def both_work() -> None:
            await until(client, lambda found: all(one["status"] == "ready" and one["share"] > 0.2 for one in found))

        async def one_dies() -> None:
            assert len(await tritons(client)) == 2  # meanwhile, all clients have asked
            psutil.Process(server.pid).kill()
            await until(client, lambda found: found[1]["left_out"] == [MODEL])

        statuses = await detect_until(client, both_work)
        assert [one["address"] for one in await tritons(client)] == [settings.triton_address, own.triton_address]
        assert [one["transport"] for one in await tritons(client)] == ["shm", "shm"]
        statuses += await detect_until(client, one_dies)
        report = json(await client.get("/health"))
        assert (report["status"], report["tritons"][1]["status"]) == ("healthy", "unreachable")
        assert json(await client.get("/readyz")) == {"status": "ready"}
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        statuses += await detect_until(client, both_work)

        assert set(statuses) == {200}
