"""Tensors in shared memory, and inline where shared memory is not available."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.main import create_app
from app.resilience.lease import Lease
from app.settings.schema import Settings
from app.triton import regions as regions_module
from app.triton import shared_memory
from app.triton import transport as transport_module
from app.triton.client import TritonClient
from app.triton.shared_memory import MAX_ARENA_BYTES, SHM, SLOTS, Arena
from app.triton.transport import Mode, Transport
from tests.fakes import models
from tests.fakes.clock import Clock
from tests.fakes.triton import FakeTriton
from tests.support import (
    NEEDS_BYTES,
    SCENE,
    captured_log,
    json,
    own_arenas,
    started,
    transport_in_use,
    transport_to,
)

Fake = tuple[FakeTriton, TritonClient]

NBYTES = 4096


async def prepared(transport: Transport, nbytes: int = NBYTES, idle_seconds: float = 0) -> Arena | None:
    """Prepare a size; return its arena, last used this long ago, or None if tensors go inline."""
    await transport.prepare(nbytes)
    slot = transport.take(nbytes, nbytes)
    if slot is None:
        return None
    slot.free()
    slot.arena.used_at -= idle_seconds
    return slot.arena


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, *(f"app.triton.{name}" for name in ("transport", "regions", "shared_memory")))


@pytest.fixture
async def transport(fake_triton: Fake) -> AsyncIterator[Transport]:
    """A transport to the fake Triton, in the mode `auto`."""
    made = transport_to(fake_triton[1])
    yield made
    await made.close()


async def test_requests_of_one_size_share_an_arena_and_larger_ones_go_inline(fake_triton: Fake, transport: Transport) -> None:
    await asyncio.gather(*(transport.prepare(NBYTES) for _ in range(20)))
    assert not transport.is_prepared(2 * NBYTES)
    assert transport.is_prepared(MAX_ARENA_BYTES + 1)
    assert await prepared(transport, MAX_ARENA_BYTES + 1) is None
    with Lease() as lease:
        small, slot = transport.allocate((10,), np.float32, NBYTES, lease)
        large, no_slot = transport.allocate((NBYTES // 4 + 1,), np.float32, NBYTES, lease)
        assert slot is not None
        assert no_slot is None
        small[:] = 1
        assert slot.array((10,), np.float32).tolist() == [1.0] * 10
        assert large.shape == (NBYTES // 4 + 1,)
        assert slot.arena.lent_bytes == 40

    assert slot.arena.lent_bytes == 0
    assert slot.arena.nbytes == SLOTS * NBYTES
    assert fake_triton[0].regions == {slot.arena.region}
    assert len(fake_triton[0].registrations) == 1


@pytest.mark.usefixtures("clock")
async def test_new_size_takes_the_place_of_the_least_recently_used(
    fake_triton: Fake, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "MAX_WORKER_BYTES", 2 * SLOTS * NBYTES)
    recent, old = await prepared(transport, NBYTES - 1, 10), await prepared(transport, NBYTES - 2, 20)
    new = await prepared(transport, NBYTES - 3)
    assert recent
    assert old
    assert new
    assert fake_triton[0].regions == {recent.region, new.region}
    assert not (SHM / old.name).exists()

    new.used_at -= 4  # alternating sizes would create an arena for each request
    slot = transport.take(NBYTES - 1, NBYTES - 1)
    recent.used_at -= 60
    assert await prepared(transport, NBYTES - 4) is None
    assert transport.is_prepared(NBYTES - 4)
    assert slot
    slot.free()


@pytest.mark.usefixtures("clock")
async def test_arenas_that_are_not_used_are_removed_but_for_the_last(fake_triton: Fake, transport: Transport) -> None:
    lent, old, recent = [await prepared(transport, NBYTES - at, idle) for at, idle in enumerate((300, 70, 50))]
    assert lent
    assert old
    assert recent
    slot = transport.take(NBYTES, NBYTES)
    assert slot
    lent.used_at -= 300
    await transport.refresh()
    assert fake_triton[0].regions == {lent.region, recent.region}
    assert not (SHM / old.name).exists()
    slot.free()
    recent.used_at -= 1000
    lent.used_at -= 3000
    await transport.refresh()
    assert fake_triton[0].regions == {recent.region}


async def test_triton_unmaps_arenas_whose_files_are_gone(fake_triton: Fake, transport: Transport) -> None:
    fake, client = fake_triton
    living = transport_to(client)
    arena = await prepared(living)
    assert arena
    gone, theirs = {"a": "/nereid-1-0123abcd", "b": "/nereid-99-0123abcd"}, {"c": "/theirs", "d": "theirs"}
    fake.regions |= gone.keys() | theirs.keys()
    fake.keys |= gone | theirs
    new = await prepared(transport)
    assert new

    assert fake.regions == {arena.region, new.region, *theirs}
    await living.close()


@pytest.mark.parametrize(
    ("refusal", "asked"),
    [(None, 1), ((grpc.StatusCode.UNIMPLEMENTED, "Method not found"), 1), ((grpc.StatusCode.UNAVAILABLE, "failed to connect"), 3)],
    ids=["other host", "other server", "no answer"],
)
async def test_refusal_is_logged_once_and_retried_after_a_while(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    refusal: tuple[grpc.StatusCode, str] | None,
    asked: int,
) -> None:
    """A Triton on another host always refuses arenas, and its files are not visible here. One without an answer has not refused."""
    fake, _ = fake_triton
    fake.regions, fake.keys = {"a"}, {"a": "/nereid-1-0123abcd"}
    log = captured_log(monkeypatch, regions_module)
    fake.accepts_regions, fake.refusal = False, refusal
    for _ in range(3):
        assert await prepared(transport) is None
    assert len(fake.registrations) == asked
    assert fake.regions == {"a"}
    clock.now += 30
    assert not transport.is_prepared(NBYTES)
    assert await prepared(transport) is None
    assert len(fake.registrations) == asked + 1
    assert [call.method_name for call in log] == (["warning", "debug"] if asked == 1 else [])
    clock.now += 30
    fake.accepts_regions, fake.refusal = True, None

    assert await prepared(transport)


REGISTER = TritonClient.register


async def register_elsewhere(client: TritonClient, arena: Arena) -> None:
    """Register an arena whose file Triton cannot find, as if it ran on another host."""
    elsewhere: Any = SimpleNamespace(name=f"{arena.name}-of-another-host", region=arena.region, nbytes=arena.nbytes)
    await REGISTER(client, elsewhere)


def no_space(_: int) -> Arena:
    raise OSError(28, "No space left on device")


NO_SPACE: tuple[str, object] = "app.triton.transport.Arena", no_space
ELSEWHERE: tuple[str, object] = "app.triton.client.TritonClient.register", register_elsewhere


@NEEDS_BYTES
@pytest.mark.usefixtures("triton")
async def test_file_travels_through_shared_memory_if_it_fits(settings: Settings) -> None:
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        for more in (0, 1 << 20):
            found = json(await client.post("/predict/file_in", content=SCENE + bytes(more)))["detections"]
            assert [d["class_name"] for d in found] == ["red", "blue"]


@pytest.mark.parametrize(
    ("mode", "cause", "status", "in_use"),
    [
        ("auto", "", 200, "shm"),
        ("shm", "", 200, "shm"),
        ("inline", "", 200, "inline"),
        ("auto", "full", 200, "inline"),
        ("shm", "full", 503, "inline"),
        ("auto", "elsewhere", 200, "inline"),
        ("shm", "elsewhere", 503, "inline"),
    ],
)
@pytest.mark.usefixtures("triton")
async def test_tensors_go_inline_without_shared_memory_if_they_may(  # noqa: PLR0913, PLR0917 - a table
    settings: Settings, monkeypatch: pytest.MonkeyPatch, mode: Mode, cause: str, status: int, in_use: str
) -> None:
    before = own_arenas()
    if cause:
        monkeypatch.setattr(*{"full": NO_SPACE, "elsewhere": ELSEWHERE}[cause])
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert (await client.post("/predict/six_columns", content=SCENE)).status_code == status
        assert await transport_in_use(client) == in_use

    assert set(own_arenas()) <= set(before)  # others, which are idle, may have been removed


@pytest.mark.usefixtures("triton")
async def test_more_requests_than_slots_are_answered(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOTS", 2)
    empty = BytesIO()
    Image.new("RGB", models.SIZE, "white").save(empty, "BMP")

    async def count(client: httpx.AsyncClient, image: bytes) -> int:
        return len(json(await client.post("/predict/six_columns", content=image))["detections"])

    async with started(create_app(settings)) as client:
        counts = await asyncio.gather(*(count(client, image) for _ in range(15) for image in (SCENE, empty.getvalue())))

    assert counts == [2, 0] * 15
