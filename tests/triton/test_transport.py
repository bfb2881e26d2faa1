"""Pixels through shared memory, with a real Triton: refused, restarted, shared and given up on."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from PIL import Image

from app import image
from app.arena import SHM, Arena, Slot
from app.config import Settings
from app.detector import Detector, Limits
from app.embedded import Server
from app.envelope import Exchange
from app.errors import DeadlinePassed, TritonUnavailable
from app.main import create_app
from app.parameters import Parameters
from app.stages import Stages
from app.transport import Transport
from app.triton import Triton
from tests import layouts
from tests.conftest import ROOT, free_port, json, started

pytestmark = pytest.mark.usefixtures("triton")

SCENE = layouts.scene("BMP")


def own() -> list[Path]:
    """The arenas of this process."""
    return list(SHM.glob(f"nereid-{os.getpid()}-*"))


async def transport_in_force(client: httpx.AsyncClient) -> str:
    """Ask for it."""
    answer: dict[str, Any] = (await client.get("/health")).json()
    return str(answer["performance"]["optimizations"]["transport"])


async def regions(settings: Settings) -> list[str]:
    """Name what Triton has mapped of ours."""
    async with httpx.AsyncClient() as client:
        known = (await client.get(f"http://127.0.0.1:{settings.triton_http_port}/v2/systemsharedmemory/status")).json()
    return [region["name"] for region in known]


async def taken(transport: Transport) -> Slot | None:
    """Take a slot as a request does."""
    await transport.prepare(4096)
    return transport.take(4096)


async def finds(client: httpx.AsyncClient, model: str = "six_columns") -> bool:
    """Whether a picture gets its boxes."""
    return [d["class_name"] for d in json(await client.post(f"/predict/{model}", content=SCENE))["detections"]] == ["red", "blue"]


@pytest.fixture
def own_triton(settings: Settings) -> Iterator[tuple[Settings, Server]]:
    """A Triton that the test may kill."""
    own = msgspec.structs.replace(
        settings, triton_http_port=free_port(), triton_grpc_port=free_port(), triton_metrics_port=free_port(), model="six_columns"
    )
    server = Server(own)
    server.start()
    yield own, server
    server.stop()


@pytest.mark.parametrize(("mode", "in_force"), [("auto", "shm"), ("shm", "shm"), ("inline", "inline")])
async def test_the_transport_in_force_is_told(settings: Settings, mode: Any, in_force: str) -> None:  # noqa: ANN401
    """Boxes are the same, /health says how the pixels went, and nothing is left of it."""
    before = own()
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert await finds(client)
        assert await finds(client, "half_four_tensors")
        assert await transport_in_force(client) == in_force

    assert own() == before


@pytest.mark.parametrize("more", [0, 1 << 20], ids=["fits", "larger than a slot"])
async def test_a_file_goes_through_shared_memory_if_it_fits(settings: Settings, more: int) -> None:
    """A larger one travels inside the request, even where shared memory is insisted on."""
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        found = json(await client.post("/predict/file_in", content=SCENE + bytes(more)))["detections"]
        assert [d["class_name"] for d in found] == ["red", "blue"]
        assert await transport_in_force(client) == "shm"


async def test_no_room_in_dev_shm_is_no_failure(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels then travel inside the request; whoever insists on shared memory is told."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.transport.Arena", full)
    async with started(create_app(settings)) as client:
        assert await finds(client)
        assert await transport_in_force(client) == "inline"
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        assert json(await client.post("/predict/six_columns", content=SCENE), 503)["code"] == "triton_unavailable"


async def test_a_triton_elsewhere_gets_the_pixels_inline(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot find the file, says so, and the file is removed again."""
    before = own()
    real = Triton.register

    async def elsewhere(self: Triton, region: str, nbytes: int) -> None:
        await real(self, f"{region}-of-another-host", nbytes)

    monkeypatch.setattr(Triton, "register", elsewhere)
    async with started(create_app(settings)) as client:
        assert await finds(client)
        assert await transport_in_force(client) == "inline"
        assert own() == before


async def test_a_triton_that_was_down_has_refused_nothing(own_triton: tuple[Settings, Server]) -> None:
    """Once it is there, shared memory is used at once, also by those who insist on it."""
    settings, server = own_triton
    server.stop()
    triton = Triton(settings.triton_url)
    transport = Transport(triton, "shm")
    with pytest.raises(TritonUnavailable):
        await taken(transport)
    assert transport.in_force == "inline"
    server.start()
    for _ in range(50):  # the connection needs its moment
        if await triton.is_ready("six_columns"):
            break
        await asyncio.sleep(0.1)

    assert await taken(transport)
    await transport.close()
    await triton.close()


async def test_more_requests_than_slots_are_answered_all_the_same(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those without a slot carry their pixels themselves; no two get each other's."""
    monkeypatch.setattr("app.transport._SLOTS", 2)
    empty = BytesIO()
    Image.new("RGB", layouts.SIZE, "white").save(empty, "BMP")

    async def found(client: httpx.AsyncClient, picture: bytes) -> int:
        return len(json(await client.post("/predict/six_columns", content=picture))["detections"])

    async with started(create_app(settings)) as client:
        counts = await asyncio.gather(*(found(client, picture) for _ in range(20) for picture in (SCENE, empty.getvalue())))

    assert counts == [2, 0] * 20


async def test_two_gateways_share_a_triton(settings: Settings) -> None:
    """Each has its own regions; one that ends takes nothing from the other."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started(create_app(settings)))
        async with started(create_app(settings)) as second:
            answers = await asyncio.gather(*(finds(client) for client in (first, second) * 10))
        assert all(answers)
        kept = await regions(settings)
        assert set(kept) == {path.name for path in own()}
        assert await finds(first)
        assert await regions(settings) == kept


async def test_a_restarted_triton_is_not_noticed(own_triton: tuple[Settings, Server]) -> None:
    """It has forgotten every region; the first request registers again and gets its boxes."""
    settings, server = own_triton
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        assert await finds(client)
        server.stop()
        server.start()
        for _ in range(50):  # the connection, not the region, needs its moment
            if (await client.get("/readyz")).status_code == 200:
                break
            await asyncio.sleep(0.1)

        assert all(await asyncio.gather(*(finds(client) for _ in range(8))))
        assert await transport_in_force(client) == "shm"


@pytest.mark.parametrize("mode", ["auto", "shm"])
async def test_a_restarted_triton_may_refuse_shared_memory(
    own_triton: tuple[Settings, Server],
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,  # noqa: ANN401
) -> None:
    """The request under way gets its boxes all the same; those after it as the setting says."""
    settings, server = own_triton
    real, before = Triton.register, own()
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert await finds(client)
        server.stop()
        server.start()
        monkeypatch.setattr(Triton, "register", lambda self, region, nbytes, *_: real(self, f"{region}-elsewhere", nbytes))
        for _ in range(50):  # the connection needs its moment
            if (await client.get("/readyz")).status_code == 200:
                break
            await asyncio.sleep(0.1)

        assert await finds(client)
        after = await client.post("/predict/six_columns", content=SCENE)
        assert after.status_code == (200 if mode == "auto" else 503)
        assert await transport_in_force(client) == "inline"
        assert own() == before
        assert await regions(settings) == []


async def test_an_arena_that_is_made_while_the_gateway_ends_is_removed_too(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it any more, but it is still being registered."""
    before = own()
    real = Triton.register

    async def slow(self: Triton, region: str, nbytes: int) -> None:
        await asyncio.sleep(0.5)
        await real(self, region, nbytes)

    monkeypatch.setattr(Triton, "register", slow)
    triton = Triton(settings.triton_url)
    transport = Transport(triton, "auto")
    waiting = asyncio.ensure_future(transport.prepare(4096))
    await asyncio.sleep(0.2)
    waiting.cancel()
    (made,) = set(own()) - set(before)
    await transport.close()
    await triton.close()

    assert not made.exists()
    assert made.name not in await regions(settings)


@pytest.fixture
async def transport(settings: Settings) -> AsyncIterator[Transport]:
    """A transport of the test's own."""
    gateway = Triton(settings.triton_url)
    made = Transport(gateway, "auto")
    yield made
    await made.close()
    await gateway.close()


async def test_a_killed_worker_leaves_nothing(transport: Transport, settings: Settings) -> None:
    """Its file is removed here, and Triton forgets the region, when the next worker starts."""
    script = """
import asyncio, os, sys
from app.transport import Transport
from app.triton import Triton
async def main():
    transport = Transport(Triton(sys.argv[1]), "shm")
    await transport.prepare(4096)
    slot = transport.take(4096)
    print(slot.arena.name, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, settings.triton_url]
    worker = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    name = worker.stdout.strip()
    assert (SHM / name).exists()
    await transport.sweep()

    assert not (SHM / name).exists()
    assert name not in await regions(settings)


async def test_a_slot_comes_back_only_when_its_rpc_has_ended(
    own_triton: tuple[Settings, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that gave up leaves its pixels where Triton may still read them."""
    settings, server = own_triton
    arenas: list[Arena] = []
    real = Arena.__init__

    def noted(self: Arena, *arguments: Any) -> None:  # noqa: ANN401
        real(self, *arguments)
        arenas.append(self)

    monkeypatch.setattr(Arena, "__init__", noted)
    hasty = msgspec.structs.replace(settings, timeout_seconds=0.5, transport="shm")
    process = psutil.Process(server.pid)
    async with started(create_app(hasty)) as client:
        assert await finds(client)
        (made,) = arenas
        slots = len(made.free_offsets)
        process.send_signal(signal.SIGSTOP)
        try:
            assert await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            assert json(await client.post("/predict/six_columns", content=SCENE), 504)["code"] == "deadline_passed"
            assert len(made.free_offsets) == slots - 1
        finally:
            process.send_signal(signal.SIGCONT)

        assert await eventually(lambda: len(made.free_offsets) == slots)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_slot_comes_back_only_when_its_thread_has_ended(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
    how: str,
) -> None:
    """A decoder cannot be stopped, so what it writes to is not lent again before."""
    may_end = threading.Event()
    real = image.decode

    def slow(*arguments: Any) -> Any:  # noqa: ANN401
        may_end.wait(10)
        return real(*arguments)

    monkeypatch.setattr(image, "decode", slow)
    triton = Triton(settings.triton_url)
    detector = Detector(triton, transport, "six_columns", frozenset(), Limits(1, 10**7, 0.5 if how == "deadline" else 30))
    model = await detector.ready("six_columns")
    slot = transport.take(model.input_bytes)
    assert slot
    slot.free()
    slots = len(slot.arena.free_offsets)
    asking = asyncio.ensure_future(detector.detect(SCENE, Parameters(), Stages(), "id"))
    assert await eventually(lambda: len(slot.arena.free_offsets) == slots - 1)
    if how == "cancel":
        asking.cancel()
    with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
        await asking
    assert len(slot.arena.free_offsets) == slots - 1
    may_end.set()

    assert await eventually(lambda: len(slot.arena.free_offsets) == slots)
    detector.close()
    await triton.close()


async def eventually(holds: Callable[[], bool]) -> bool:
    """Wait up to ten seconds until something holds."""
    for _ in range(100):
        if holds():
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize(("model", "code"), [("six_columns", "broken_picture"), ("absent", "unknown_model")])
async def test_a_refused_picture_is_let_go_at_once(settings: Settings, model: str, code: str) -> None:
    """No ring of references keeps the body until the garbage collector comes by."""
    async with started(create_app(settings)) as client:
        assert await finds(client)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):  # the test's own client holds on to the last
                assert (await client.post(f"/predict/{model}", content=SCENE[:500])).json()["code"] == code
            gc.collect()
            kept = [thing for thing in gc.garbage if isinstance(thing, Exchange)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    assert not kept


async def test_a_broken_picture_gives_its_slot_back(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than there are slots, and shared memory is still to be had."""
    monkeypatch.setattr("app.transport._SLOTS", 2)
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        for _ in range(5):
            json(await client.post("/predict/six_columns", content=SCENE[:500]), 422)

        assert await finds(client)
