"""A pool of several Tritons, which have different models: who is in it, and who is chosen."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.spec import ModelSpec
from app.triton import client as client_module
from app.triton import membership as membership_module
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.membership import Membership, Target, resolve
from app.triton.model_on_server import ModelOnServer
from app.triton.pool import TritonPool, choose
from app.triton.transport import Transport
from tests.fakes.triton import CONFIG, DOWN, GONE, NOT_LOADED, SPEC, FakeTriton, Refusal, serving
from tests.support import TABLE, Clock, eventually, in_cycles


class Two(NamedTuple):
    pool: TritonPool
    fakes: list[FakeTriton]

    @property
    def servers(self) -> list[TritonBackend]:
        return self.pool.servers


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    fakes = [FakeTriton(), FakeTriton()]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving(fake))
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(fake.url), TABLE) for fake in fakes])
        stack.push_async_callback(pool.close)
        await eventually(lambda: all(server.client.server for server in pool.servers))
        yield Two(pool, fakes)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers of Triton longer than any test takes."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 600.0)


def found_at(two: Two, spec: ModelSpec = SPEC) -> set[int]:
    found = [two.pool.find(spec, lambda _: 1) for _ in range(100)]
    return {[server is served.server for server in two.servers].index(True) for served in found if served is not None}


async def ask_both(two: Two, *models: str) -> None:
    for model in models or ("tiny",):
        await asyncio.gather(*(server.specs.get(model) for server in two.servers))


def open_circuit(server: TritonBackend) -> None:
    """Mark a Triton as one that does not run the model."""
    circuit: Any = SimpleNamespace(is_closed=False, close=partial(asyncio.sleep, 0))
    server.model("tiny").circuit = circuit


async def test_model_that_a_triton_has_is_found_there_and_looked_for_elsewhere(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, has_it = Clock(monkeypatch, "app.triton.backend", "app.triton.specs"), 1
    fake, other = two.fakes[has_it], two.fakes[1 - has_it]
    other.model_refusal = GONE
    assert await two.pool.spec("tiny") is two.pool.cached("tiny")
    assert found_at(two) == {has_it}
    assert (await two.pool.describe("ModelMetadata", "tiny"))["name"] == "tiny"
    other.model_refusal, fake.model_refusal = GONE, DOWN
    with pytest.raises(GatewayError):
        await two.pool.describe("ModelMetadata", "tiny")
    specs = two.servers[1 - has_it].specs
    with pytest.raises(UnknownModel):  # after this answer, no question is pending
        await specs.get("tiny")
    asked = other.config_reads
    for _ in range(4):
        clock.now += 1
        await two.pool.refresh()
        await eventually(lambda: other.config_reads > asked)
        await two.servers[1 - has_it].client.read_server()  # answered after any question of the pool
    other.model_refusal = fake.model_refusal = None
    clock.now += 6
    assert other.config_reads == asked + 1
    await two.pool.refresh()
    await eventually(lambda: specs.has("tiny"))
    assert found_at(two) == {0, 1}

    two.pool.forget(two.servers[has_it].model("tiny"), "tiny")  # it may have changed, and is read at once
    assert found_at(two) == {1 - has_it}
    await eventually(lambda: two.servers[has_it].specs.has("tiny"))


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        ((GONE, GONE), UnknownModel),
        ((GONE, None), UnknownVersion),
        ((DOWN, GONE), TritonUnavailable),  # the other Triton may have the model
        ((DOWN, NOT_LOADED), ModelNotReady),
    ],
)
async def test_error_that_says_most_is_raised(two: Two, refusals: tuple[Refusal | None, ...], error: type[GatewayError]) -> None:
    """It leaves no reference cycle, which would keep an image."""
    for fake, refusal in zip(two.fakes, refusals, strict=True):
        fake.model_refusal = refusal
    with in_cycles(GatewayError) as kept:
        with pytest.raises(error):
            await two.pool.spec("tiny:3")
        await asyncio.sleep(0)

    assert kept == []


async def test_model_that_differs_is_used_only_while_the_first_does_not_run(two: Two) -> None:
    two.fakes[1].config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    await ask_both(two)
    specs = [server.specs.known(SPEC) for server in two.servers]
    assert two.pool.cached("tiny") is specs[0]
    assert found_at(two, specs[0]) == {0}
    open_circuit(two.servers[0])
    assert two.pool.cached("tiny") is specs[1]
    assert found_at(two, specs[1]) == {1}


async def test_triton_whose_circuit_is_open_gets_no_calls_and_no_retries(two: Two) -> None:
    """If no other Triton works, calls are made nevertheless, because their errors are the answers."""
    await ask_both(two)
    first, second = (server.model("tiny") for server in two.servers)
    assert two.pool.find_other(first, SPEC, SPEC.max_batch + 1) is None
    assert two.pool.find_other(first, SPEC, SPEC.max_batch) is second
    open_circuit(two.servers[1])
    assert two.pool.find_other(first, SPEC) is None
    assert found_at(two) == {0}
    assert two.pool.is_usable("tiny")
    assert await two.pool.is_ready("tiny")
    two.fakes[0].is_model_ready = False
    assert not await two.pool.is_ready("tiny")
    two.servers[1].specs.forget("tiny")
    open_circuit(two.servers[0])
    second.circuit = None
    assert (two.pool.is_usable("tiny"), two.pool.is_usable("other")) == (False, True)  # the other one does not have it
    assert found_at(two) == {0}


NEW, FAILS_AT_ONCE = 0.0, -1.0


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ([(3, 100), (2, 100)], [0, 1]),
        ([(3, 1000), (2, NEW)], [0, 1]),
        ([(9, 100), (2, 20)], [1, 0]),  # a slower one may have fewer images
        ([(0, 90), (0, 10)], [0.9, 0.1]),  # the slower one may have become faster
        ([(0, FAILS_AT_ONCE), (4, 100)], [0, 1]),
        ([(0, NEW), (1, NEW), (2, NEW), (3, NEW)], [1 / 2, 1 / 3, 1 / 6, 0]),  # not all workers choose the same one
    ],
)
def test_triton_that_would_finish_first_is_chosen(
    monkeypatch: pytest.MonkeyPatch, candidates: list[tuple[int, float]], shares: list[float]
) -> None:
    """By images in flight, and measured speed in images per second."""
    clock = Clock(monkeypatch, "app.triton.model_on_server")
    random.seed(1)
    made = [ModelOnServer(None) for _ in candidates]  # type: ignore[arg-type]  # nothing is asked of its server
    for served, (images, speed) in zip(made, candidates, strict=True):
        if speed:
            served.begin(1)
            clock.now += max(1 / speed, 0.001)
            served.note_answer(int(speed > 0), clock.now - max(1 / speed, 0.001))
            served.calls = served.images = 0
        if images:
            served.begin(images)
    chosen = Counter(made.index(choose(made)) for _ in range(2000))

    assert [chosen[index] / 2000 for index in range(len(made))] == pytest.approx(shares, abs=0.05)


class Names(dict[str, list[str]]):
    """Replaces the system's resolver: IP addresses by name."""

    asked = 0

    def __call__(self, host: str, port: int, *_: object, **__: object) -> list[Any]:
        self.asked += 1
        if host not in self:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    return names


@pytest.fixture
async def pool() -> AsyncIterator[TritonPool]:
    made = TritonPool(Transport("inline"))
    yield made
    await made.close()


def connect(target: Target) -> TritonBackend:
    return TritonBackend(TritonClient(target.address, host=target.host, ips=target.ips), TABLE)


def addresses(pool: TritonPool) -> list[str]:
    return [server.address for server in pool.servers]


@pytest.mark.parametrize(
    ("address", "targets"),
    [
        ("192.0.2.1:8001", [Target("192.0.2.1:8001")]),
        ("[2001:db8::7]:8001", [Target("[2001:db8::7]:8001")]),
        ("unix:/run/triton", [Target("unix:/run/triton")]),
        ("gpu:8001", [Target("gpu:8001", ips=("2001:db8::7", "192.0.2.2", "192.0.2.1"))]),  # in the resolver's order
        ("dns:///gpu:8001", [Target(f"{ip}:8001", "gpu") for ip in ("192.0.2.1", "192.0.2.2", "[2001:db8::7]")]),
    ],
)
async def test_address_is_one_triton_or_as_many_as_its_name_has(names: Names, address: str, targets: list[Target]) -> None:
    names["gpu"] = ["2001:db8::7", "192.0.2.2", "192.0.2.1", "2001:db8::7"]

    assert await resolve(address) == targets
    assert names.asked == ("gpu" in address)


async def test_name_that_has_moved_is_followed(names: Names, pool: TritonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that fails takes no Triton away. While one cannot be reached, names are resolved sooner."""
    clock = Clock(monkeypatch, "app.triton.membership")
    monkeypatch.setattr(membership_module, "_SOON_SECONDS", 0.01)
    async with serving(FakeTriton()) as port:
        running = asyncio.create_task(Membership(pool, [f"gpu:{port}"], connect).run())
        names["gpu"] = ["127.0.0.9"]
        await eventually(lambda: addresses(pool) == [f"gpu:{port}"])
        del names["gpu"]
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        assert addresses(pool) == [f"gpu:{port}"]
        names["gpu"] = ["::1", "127.0.0.1"]  # the first one that answers is used

        await eventually(lambda: pool.servers[0].client.server is not None)
        for _ in range(2):
            await asyncio.sleep(0.1)
            asked = names.asked
            await asyncio.sleep(0.1)
            assert names.asked == asked
            clock.now += 5
            await eventually(lambda asked=asked: names.asked > asked)  # type: ignore[misc]
        running.cancel()
    await Membership(pool, ["192.0.2.9:8001"], connect).run()  # has nothing to resolve


async def test_tritons_come_and_go_with_the_addresses_of_a_name_once_their_calls_have_ended(names: Names, pool: TritonPool) -> None:
    names["gpus"] = ["192.0.2.1", "192.0.2.2"]
    membership = Membership(pool, ["192.0.2.9:8001", "dns:///gpus:8001", "192.0.2.1:8001"], connect)
    await membership.refresh()
    assert addresses(pool) == ["192.0.2.9:8001", "192.0.2.1:8001", "192.0.2.2:8001"]
    stays, _, gone = pool.servers
    served = gone.model("tiny")
    served.begin(2)
    names["gpus"] = ["192.0.2.3"]
    await membership.refresh()
    await pool.refresh()
    assert addresses(pool) == ["192.0.2.9:8001", "192.0.2.1:8001", "192.0.2.3:8001"]
    assert pool.servers[0] is stays
    assert pool.leaving == [gone]
    found = pool.find(SPEC, lambda _: 1)
    assert found is not None
    assert found.server in pool.servers
    served.images = 0
    await pool.refresh()

    assert pool.leaving == []
