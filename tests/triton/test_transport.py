"""Tensors in shared memory, and inline where shared memory is not available."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from io import BytesIO
from time import monotonic
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.embedded.server import EmbeddedTriton
from app.errors import TritonUnavailable
from app.main import create_app
from app.resilience.lease import Lease
from app.settings.schema import Settings
from app.triton import regions as regions_module
from app.triton import shared_memory
from app.triton import transport as transport_module
from app.triton.client import TritonClient
from app.triton.regions import Regions
from app.triton.shared_memory import MAX_ARENA_BYTES, SHM, SLOTS, Arena, Slot, arena_bytes
from app.triton.transport import InputBuffer, Transport
from tests.fakes import models
from tests.fakes.clock import Clock
from tests.fakes.triton import FakeTriton, serving
from tests.support import (
    NEEDS_BYTES,
    ROOT,
    SCENE,
    captured_log,
    eventually,
    finds,
    is_mapped,
    json,
    own_arenas,
    regions,
    started,
    transport_in_use,
    transport_to,
    until_ready,
)

Fake = tuple[FakeTriton, TritonClient]

NBYTES = 4096
SHAPE = (64, 64)
OUT_OF_SPACE = OSError(28, "No space left on device")


async def taken(transport: Transport) -> Slot | None:
    await transport.prepare(NBYTES)
    return transport.take(NBYTES, NBYTES)


def allocated(transport: Transport, lease: Lease) -> InputBuffer:
    """Allocate a tensor that just fits a slot of `NBYTES`."""
    return transport.allocate(SHAPE, np.uint8, NBYTES, lease)


def raise_out_of_space(*_: object) -> None:
    raise OUT_OF_SPACE


@pytest.fixture
async def transport(fake_triton: Fake) -> AsyncIterator[Transport]:
    """A transport to the fake Triton, in the mode `auto`."""
    _, client = fake_triton
    made = transport_to(client)
    yield made
    await made.close()


@pytest.fixture
async def real_transport(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[Transport]:
    assert triton.poll() is None
    client = TritonClient(settings.triton_address)
    made = transport_to(client)
    yield made
    await made.close()
    await client.close()


async def test_a_prepared_size_has_slots(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    slot = await taken(transport)

    assert slot
    assert (SHM / slot.arena.name).stat().st_size == SLOTS * NBYTES
    assert fake.regions == {slot.arena.region}
    assert transport.is_prepared(NBYTES)
    assert is_mapped(transport)


@pytest.mark.parametrize(("slot_bytes", "slots"), [(NBYTES, SLOTS), (MAX_ARENA_BYTES // 2, 2), (MAX_ARENA_BYTES + 1, 0)])
def test_an_arena_has_as_many_slots_as_fit(slot_bytes: int, slots: int) -> None:
    assert arena_bytes(slot_bytes) == slots * slot_bytes


async def test_many_requests_prepare_a_size_once(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    before = own_arenas()
    await asyncio.gather(*(transport.prepare(NBYTES) for _ in range(20)))
    await transport.prepare(NBYTES)

    assert len(own_arenas()) == len(before) + 1
    assert len(fake.registrations) == 1


async def test_large_tensors_get_fewer_slots(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    await transport.prepare(MAX_ARENA_BYTES // 2 - 1)
    slot = transport.take(MAX_ARENA_BYTES // 2 - 1, MAX_ARENA_BYTES // 2 - 1)

    assert slot
    assert slot.arena.nbytes == MAX_ARENA_BYTES - 2
    assert not transport.is_prepared(MAX_ARENA_BYTES)
    assert transport.is_prepared(MAX_ARENA_BYTES + 1)
    await transport.prepare(MAX_ARENA_BYTES + 1)
    assert transport.take(MAX_ARENA_BYTES + 1, MAX_ARENA_BYTES + 1) is None
    assert fake.regions == {slot.arena.region}


@pytest.fixture
def _room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a worker to two arenas of 32 slots of `NBYTES`, or one of twice the size."""
    monkeypatch.setattr(transport_module, "MAX_WORKER_BYTES", 2 * SLOTS * NBYTES)


async def prepared(transport: Transport, nbytes: int, idle_seconds: float = 0) -> Arena:
    """Create an arena that was last used this long ago."""
    await transport.prepare(nbytes)
    slot = transport.take(nbytes, nbytes)
    assert slot
    slot.free()
    slot.arena.used_at -= idle_seconds
    return slot.arena


@pytest.mark.usefixtures("_room_for_two")
async def test_a_new_size_takes_the_place_of_the_least_recently_used(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    recent, old = await prepared(transport, NBYTES - 1, 10), await prepared(transport, NBYTES - 2, 20)
    new = await prepared(transport, NBYTES - 3)

    assert fake.regions == {recent.region, new.region}
    assert not (SHM / old.name).exists()
    assert not transport.is_prepared(NBYTES - 2)
    again = await prepared(transport, NBYTES - 2)
    assert fake.regions == {new.region, again.region}
    assert set(own_arenas()) >= {SHM / new.name, SHM / again.name}


@pytest.mark.usefixtures("_room_for_two")
async def test_without_room_a_new_size_travels_inline_for_a_while(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    lent, used = await prepared(transport, NBYTES - 1, 10), await prepared(transport, NBYTES - 2)
    slot = transport.take(NBYTES - 1, NBYTES - 1)
    assert slot
    lent.used_at -= 10
    await transport.prepare(NBYTES - 3)

    assert transport.is_prepared(NBYTES - 3)
    assert transport.take(NBYTES - 3, NBYTES - 3) is None
    assert all(map(transport.is_prepared, (NBYTES - 1, NBYTES - 2)))
    now = monotonic() + 6
    monkeypatch.setattr(transport_module, "monotonic", lambda: now)
    assert not transport.is_prepared(NBYTES - 3)
    await transport.prepare(NBYTES - 3)
    assert transport.take(NBYTES - 3, NBYTES - 3)
    assert (SHM / lent.name).exists()
    assert not (SHM / used.name).exists()


async def test_a_full_dev_shm_concerns_one_size(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    now = monotonic()
    monkeypatch.setattr(transport_module, "monotonic", lambda: now)

    def create(nbytes: int) -> Arena:
        if nbytes > SLOTS * NBYTES:
            raise OUT_OF_SPACE
        return Arena(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(transport_module, "Arena", create)
        await transport.prepare(2 * NBYTES)
        assert transport.is_prepared(2 * NBYTES)
        assert transport.take(2 * NBYTES, 2 * NBYTES) is None
        assert not transport.is_prepared(NBYTES)
        assert await taken(transport)
    now += 30
    assert not transport.is_prepared(2 * NBYTES)
    await transport.prepare(2 * NBYTES)

    assert transport.take(2 * NBYTES, 2 * NBYTES)


async def test_arenas_that_are_not_used_are_removed(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    lent = await prepared(transport, NBYTES - 1)
    slot = transport.take(NBYTES - 1, NBYTES - 1)
    assert slot
    lent.used_at -= 300
    old, recent, last = [await prepared(transport, NBYTES - 2 - at, idle) for at, idle in enumerate((70, 50, 40))]
    await transport.refresh()

    assert fake.regions == {lent.region, recent.region, last.region}
    assert not (SHM / old.name).exists()
    slot.free()
    recent.used_at -= 300
    last.used_at -= 200
    await transport.refresh()
    assert fake.regions == {last.region}
    assert [path.name for path in own_arenas() if path.name in {lent.name, recent.name, last.name}] == [last.name]


async def test_single_arena_is_not_removed(transport: Transport) -> None:
    await transport.refresh()
    only = await prepared(transport, NBYTES, 1000)
    await transport.refresh()

    assert (SHM / only.name).exists()


async def test_inline_creates_no_arena(fake_triton: Fake) -> None:
    fake, client = fake_triton
    before = own_arenas()
    transport = transport_to(client, "inline")
    assert transport.is_prepared(NBYTES)
    assert await taken(transport) is None

    assert set(own_arenas()) <= set(before)  # others, which are idle, may have been removed
    assert not fake.registrations
    assert not is_mapped(transport)


async def test_a_refusal_is_logged_once_and_retried_after_a_while(
    fake_triton: Fake, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton on another host always rejects arenas; another Triton may accept them later."""
    fake, _ = fake_triton
    log = captured_log(monkeypatch, regions_module)
    now = 1000.0
    for module in (transport_module, regions_module):
        monkeypatch.setattr(module, "monotonic", lambda: now)
    fake.accepts_regions = False
    for _ in range(3):
        assert await taken(transport) is None
    assert transport.is_prepared(NBYTES)
    assert len(fake.registrations) == 1
    now += 30
    assert not transport.is_prepared(NBYTES)
    assert await taken(transport) is None
    assert len(fake.registrations) == 2
    assert [call.method_name for call in log] == ["warning", "debug"]
    assert "Unable to open" in log[0].kwargs["reason"]
    fake.accepts_regions = True
    now += 30

    assert await taken(transport)
    assert is_mapped(transport)


async def test_a_server_without_shared_memory_has_rejected_it(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    fake, client = fake_triton
    fake.refusal = grpc.StatusCode.UNIMPLEMENTED, "Method not found"
    transport = transport_to(client)
    for _ in range(3):
        assert await taken(transport) is None

    assert len(fake.registrations) == 1
    await transport.close()


async def test_a_triton_that_does_not_answer_has_not_rejected(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    before = own_arenas()
    fake.refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    assert await taken(transport) is None
    await eventually(lambda: own_arenas() == before)
    assert not transport.is_prepared(NBYTES)
    fake.refusal = None

    assert await taken(transport)


async def test_a_region_that_is_rejected_when_registered_again_is_given_up(fake_triton: Fake, transport: Transport) -> None:
    fake, _ = fake_triton
    slot = await taken(transport)
    assert slot
    fake.regions.clear()
    fake.accepts_regions = False

    assert not await transport.regions[0].add_again(slot.arena)
    fake.accepts_regions = True
    assert await transport.regions[0].add_again(slot.arena)
    assert not is_mapped(transport)
    assert not transport.is_prepared(NBYTES)
    assert transport.take(NBYTES, NBYTES) is None
    assert (SHM / slot.arena.name).exists()
    await transport.prepare(NBYTES)
    await eventually(lambda: not (SHM / slot.arena.name).exists())
    assert fake.regions == set()
    assert transport.is_prepared(NBYTES)
    assert transport.take(NBYTES, NBYTES) is None


@pytest.fixture
async def two_tritons(
    fake_triton: Fake, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[list[FakeTriton], list[Regions], Transport]]:
    """Two fakes, their regions, and a transport to both, with a long patience."""
    monkeypatch.setattr(transport_module, "_PATIENCE_SECONDS", 60.0)
    fakes = [fake_triton[0], FakeTriton()]
    async with serving(fakes[1]):
        clients = [fake_triton[1], TritonClient(fakes[1].url)]
        regions = [Regions(client) for client in clients]
        transport = Transport("auto", *regions)
        yield fakes, regions, transport
        await transport.close()
        await clients[1].close()


async def test_a_dead_triton_costs_the_requests_of_another_no_arenas(
    two_tritons: tuple[list[FakeTriton], list[Regions], Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes, _, transport = two_tritons
    log = captured_log(monkeypatch, regions_module)
    clock = Clock(monkeypatch, "app.triton.transport", "app.triton.regions")
    fakes[0].refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    fakes[1].accepts_regions = False
    for _ in range(10):
        assert await taken(transport) is None
    await eventually(lambda: len(fakes[0].registrations) == 1)
    clock.now += 2.1
    for _ in range(10):
        assert await taken(transport) is None
    await eventually(lambda: len(fakes[0].registrations) == 2)

    assert len(fakes[1].registrations) == 1
    assert [call.kwargs["triton"] for call in log] == [fakes[1].url]


async def test_insisting_on_shared_memory_without_it_is_an_error(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode `shm`, tensors are sent inline if all slots are lent, but not if /dev/shm is full."""
    _, client = fake_triton
    monkeypatch.setattr(shared_memory, "SLOTS", 1)
    transport = transport_to(client, "shm")
    assert await taken(transport)
    assert await taken(transport) is None
    monkeypatch.setattr(transport_module, "Arena", raise_out_of_space)
    await transport.prepare(2 * NBYTES)
    with pytest.raises(TritonUnavailable, match="required by the settings"):
        transport.take(2 * NBYTES, 2 * NBYTES)
    await transport.close()


async def test_the_sweep_is_logged_if_it_found_something(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, transport_module)
    for found in (["nereid-1-0", "nereid-1-1"], []):
        monkeypatch.setattr("app.triton.shared_memory.sweep", lambda found=found: found)
        await transport.sweep()

    assert [call.kwargs for call in log] == [{"arenas": ["nereid-1-0", "nereid-1-1"]}]


async def test_triton_forgets_arenas_whose_files_are_gone(fake_triton: Fake, transport: Transport) -> None:
    fake, client = fake_triton
    living = transport_to(client)
    slot = await taken(living)
    assert slot is not None
    for name, key in (("a", "/nereid-1-0123abcd"), ("b", "/nereid-99-0123abcd"), ("c", "/theirs"), ("d", "theirs")):
        fake.regions.add(name)
        fake.keys[name] = key
    assert await taken(transport)

    assert fake.regions >= {slot.arena.region, "c", "d"}
    assert not fake.regions & {"a", "b"}
    assert len(fake.regions) == 4
    await living.close()


async def test_a_triton_of_another_host_keeps_what_it_has_mapped(fake_triton: Fake, transport: Transport) -> None:
    """The files of a gateway on that host are not visible here."""
    fake, _ = fake_triton
    fake.regions, fake.keys = {"a"}, {"a": "/nereid-1-0123abcd"}
    fake.accepts_regions = False
    assert await taken(transport) is None

    assert fake.regions == {"a"}


@pytest.mark.parametrize(("mode", "in_use"), [("auto", "shm"), ("shm", "shm"), ("inline", "inline")])
@pytest.mark.usefixtures("triton")
async def test_health_reports_the_transport_in_use(settings: Settings, mode: Any, in_use: str) -> None:  # noqa: ANN401
    before = own_arenas()
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert await finds(client)
        assert await finds(client, "half_four_tensors")
        assert await transport_in_use(client) == in_use

    assert set(own_arenas()) <= set(before)  # others, which are idle, may have been removed


@NEEDS_BYTES
@pytest.mark.parametrize("more", [0, 1 << 20], ids=["fits", "larger than a slot"])
@pytest.mark.usefixtures("triton")
async def test_a_file_travels_through_shared_memory_if_it_fits(settings: Settings, more: int) -> None:
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        found = json(await client.post("/predict/file_in", content=SCENE + bytes(more)))["detections"]
        assert [d["class_name"] for d in found] == ["red", "blue"]
        assert await transport_in_use(client) == "shm"


@pytest.mark.usefixtures("triton")
async def test_a_full_dev_shm_is_not_a_failure(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "Arena", raise_out_of_space)
    async with started(create_app(settings)) as client:
        assert await finds(client)
        assert await transport_in_use(client) == "inline"
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        assert json(await client.post("/predict/six_columns", content=SCENE), 503)["code"] == "triton_unavailable"


@pytest.mark.usefixtures("triton")
async def test_a_triton_on_another_host_gets_the_tensors_inline(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_arenas()
    monkeypatch.setattr(TritonClient, "register", register_elsewhere)
    async with started(create_app(settings)) as client:
        assert await finds(client)
        assert await transport_in_use(client) == "inline"
        assert set(own_arenas()) <= set(before)  # others, which are idle, may have been removed


class ArenaElsewhere:
    """An arena whose file Triton cannot find, as if it ran on another host."""

    def __init__(self, arena: Arena) -> None:
        self.name = f"{arena.name}-of-another-host"
        self.region = arena.region
        self.nbytes = arena.nbytes


REGISTER = TritonClient.register


async def register_elsewhere(client: TritonClient, arena: Any) -> None:  # noqa: ANN401
    await REGISTER(client, ArenaElsewhere(arena))  # type: ignore[arg-type]


@pytest.mark.system
async def test_a_triton_that_was_down_has_not_rejected(own_triton: tuple[Settings, EmbeddedTriton]) -> None:
    settings, server = own_triton
    server.stop()
    client = TritonClient(settings.triton_address)
    transport = transport_to(client, "shm")
    with pytest.raises(TritonUnavailable):
        await taken(transport)
    assert not is_mapped(transport)
    server.start()
    await eventually(lambda: client.server is not None)

    assert await taken(transport)
    await transport.close()
    await client.close()


@pytest.mark.usefixtures("triton")
async def test_a_real_triton_accepts_an_arena_twice(settings: Settings, real_transport: Transport) -> None:
    """Two requests may register an arena at the same time."""
    slot = await taken(real_transport)
    assert slot
    assert all(await asyncio.gather(*(real_transport.regions[0].add_again(slot.arena) for _ in range(3))))

    assert slot.arena.name in await regions(settings)


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


@pytest.mark.usefixtures("triton")
async def test_two_gateways_share_a_triton(settings: Settings, arenas: list[Arena]) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started(create_app(settings)))
        async with started(create_app(settings)) as second:
            answers = await asyncio.gather(*(finds(client) for client in (first, second) * 10))
        assert all(answers)
        made = {arena.name for arena in arenas}
        kept = {path.name for path in own_arenas()} & made
        assert kept
        for _ in range(2):
            assert set(await regions(settings)) & made == kept < made
            assert await finds(first)


@pytest.mark.system
async def test_callers_do_not_notice_a_restart_of_triton(own_triton: tuple[Settings, EmbeddedTriton]) -> None:
    settings, server = own_triton
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        assert await finds(client)
        server.stop()
        server.start()
        await until_ready(client)

        assert all(await asyncio.gather(*(finds(client) for _ in range(8))))
        assert await transport_in_use(client) == "shm"


@pytest.mark.system
@pytest.mark.parametrize("mode", ["auto", "shm"])
async def test_a_restarted_triton_may_reject_shared_memory(
    own_triton: tuple[Settings, EmbeddedTriton],
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,  # noqa: ANN401
) -> None:
    settings, server = own_triton
    before = own_arenas()
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert await finds(client)
        server.stop()
        server.start()
        monkeypatch.setattr(TritonClient, "register", register_elsewhere)
        await until_ready(client)

        assert await finds(client)
        after = await client.post("/predict/six_columns", content=SCENE)
        assert after.status_code == (200 if mode == "auto" else 503)
        assert await transport_in_use(client) == "inline"
        assert set(own_arenas()) <= set(before)
        assert await regions(settings) == []


async def test_a_killed_worker_leaves_nothing(real_transport: Transport, settings: Settings) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from app.triton.client import TritonClient
from app.triton.regions import Regions
from app.triton.transport import Transport
async def main():
    transport = Transport("shm", Regions(TritonClient(sys.argv[1])))
    await transport.prepare(4096)
    slot = transport.take(4096, 4096)
    print(slot.arena.name, flush=True)
    sys.stdin.read()
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, settings.triton_address]
    worker = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    name = (await worker.stdout.readline()).decode().strip()
    assert (SHM / name).exists()
    worker.kill()
    await worker.wait()
    assert name in await regions(settings)
    await real_transport.sweep()
    assert await taken(real_transport)

    assert not (SHM / name).exists()
    assert name not in await regions(settings)


async def test_a_smaller_tensor_lies_at_the_start_of_its_slot(transport: Transport) -> None:
    """Most files are smaller than the maximum size."""
    await transport.prepare(NBYTES)
    with Lease() as lease:
        tensor, slot = transport.allocate((10,), np.float32, NBYTES, lease)
        assert slot is not None
        tensor[:] = 1

        assert tensor.shape == (10,)
        assert slot.array((10,), np.float32).tolist() == [1.0] * 10


async def test_a_tensor_larger_than_a_slot_has_memory_of_its_own(transport: Transport) -> None:
    await transport.prepare(NBYTES)
    with Lease() as lease:
        tensor, slot = transport.allocate((NBYTES // 4 + 1,), np.float32, NBYTES, lease)
        assert tensor.shape == (NBYTES // 4 + 1,)
        assert slot is None
        other = transport.take(NBYTES, NBYTES)
        assert other is not None
        assert other.arena.lent_bytes == NBYTES
        other.free()


async def test_without_shared_memory_a_tensor_has_memory_of_its_own() -> None:
    with Lease() as lease:
        tensor, slot = Transport("inline").allocate(SHAPE, np.float16, NBYTES * 2, lease)

    assert slot is None
    assert (tensor.shape, tensor.dtype) == (SHAPE, np.dtype(np.float16))


async def test_a_missing_slot_is_an_error_where_shared_memory_is_required() -> None:
    with pytest.raises(TritonUnavailable), Lease() as lease:
        allocated(Transport("shm"), lease)
