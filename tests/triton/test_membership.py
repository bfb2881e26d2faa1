"""Addresses in the settings become Tritons in the pool; the IP addresses of a name may change."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.triton import membership as membership_module
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.membership import Membership, Target, resolve
from app.triton.pool import TritonPool
from app.triton.transport import Transport
from tests.fakes.clock import Clock
from tests.fakes.triton import SPEC, FakeTriton, serving
from tests.support import TABLE, captured_log, eventually


class Names:
    """Replaces the system's resolver; tests set the IP addresses of names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, *_: object, **__: object) -> list[Any]:
        self.asked += 1
        found = self.addresses.get(host)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


class CountingClock(Clock):
    """Counts how often the time is read, as it is before names are resolved."""

    reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return super().__call__()

    async def is_read_again(self) -> None:
        before = self.reads
        await eventually(lambda: self.reads > before + 2)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
async def pool() -> AsyncIterator[TritonPool]:
    made = TritonPool(Transport("inline"))
    yield made
    await made.close()


def connect(target: Target) -> TritonBackend:
    return TritonBackend(TritonClient(target.address, host=target.host, ips=target.ips), TABLE)


def addresses(pool: TritonPool) -> list[str]:
    return [server.address for server in pool.servers]


@pytest.mark.parametrize("address", ["192.0.2.1:8001", "[2001:db8::7]:8001"])
async def test_an_ip_address_is_one_triton(names: Names, address: str) -> None:
    assert await resolve(address) == [Target(address)]
    assert names.asked == 0


async def test_the_addresses_of_a_name_are_one_triton(names: Names) -> None:
    """They keep the resolver's order. Only with `dns:///`, each address is a Triton."""
    names.addresses["gpu"] = ["2001:db8::7", "192.0.2.1", "2001:db8::7"]

    assert await resolve("gpu:8001") == [Target("gpu:8001", ips=("2001:db8::7", "192.0.2.1"))]


async def test_the_first_address_of_a_name_that_answers_is_used(names: Names, pool: TritonPool) -> None:
    names.addresses["gpu"] = ["::1", "127.0.0.1"]
    async with serving(FakeTriton()) as port:
        await Membership(pool, [f"gpu:{port}"], connect).refresh()
        (server,) = pool.servers

        assert server.address == f"gpu:{port}"
        await eventually(lambda: server.client.server is not None)


async def test_a_name_that_has_moved_is_followed(names: Names, pool: TritonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_SOON_SECONDS", 0.01)
    async with serving(FakeTriton()) as port:
        membership = Membership(pool, [f"gpu:{port}"], connect)
        await membership.refresh()
        assert pool.servers == []
        running = asyncio.create_task(membership.run())
        names.addresses["gpu"] = ["127.0.0.9"]
        await eventually(lambda: len(pool.servers) == 1)
        del names.addresses["gpu"]
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        names.addresses["gpu"] = ["127.0.0.1"]

        await eventually(lambda: pool.servers[0].client.server is not None)
        assert addresses(pool) == [f"gpu:{port}"]
        running.cancel()


async def test_a_triton_that_answers_stays_while_its_name_has_its_address(names: Names, pool: TritonPool) -> None:
    """Resolvers return the addresses of a name in any order, and not always all of them."""
    names.addresses["gpu"] = ["127.0.0.1", "192.0.2.1"]
    async with serving(FakeTriton()) as port:
        membership = Membership(pool, [f"gpu:{port}"], connect)
        await membership.refresh()
        (server,) = pool.servers
        await eventually(lambda: server.client.server is not None)
        for found in (["192.0.2.1", "127.0.0.1"], ["127.0.0.1"], ["192.0.2.1", "192.0.2.2"]):
            names.addresses["gpu"] = found
            await membership.refresh()
            assert pool.servers == [server]
        names.addresses["gpu"] = ["192.0.2.3"]
        await membership.refresh()

        assert pool.leaving == [server]
        assert addresses(pool) == [f"gpu:{port}"]


async def test_a_name_is_as_many_tritons_as_it_has_addresses(names: Names) -> None:
    """Addresses are sorted and without duplicates; a certificate must name the host."""
    names.addresses["gpus"] = ["192.0.2.2", "2001:db8::7", "192.0.2.1", "192.0.2.2"]

    assert await resolve("dns:///gpus:8001") == [
        Target("192.0.2.1:8001", "gpus"),
        Target("192.0.2.2:8001", "gpus"),
        Target("[2001:db8::7]:8001", "gpus"),
    ]


@pytest.mark.usefixtures("names")
async def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(OSError, match="not known"):
        await resolve("dns:///nowhere.invalid:8001")


async def test_a_name_that_cannot_exist() -> None:
    """A label of the name is too long, so the resolver is not called."""
    with pytest.raises(OSError, match=r"."):
        await resolve(f"dns:///{'x' * 70}.example.org.invalid:8001")


async def test_all_addresses_are_used_once(names: Names, pool: TritonPool) -> None:
    names.addresses["gpus"] = ["192.0.2.1", "192.0.2.2"]
    await Membership(pool, ["192.0.2.9:8001", "dns:///gpus:8001", "192.0.2.1:8001"], connect).refresh()

    assert addresses(pool) == ["192.0.2.9:8001", "192.0.2.1:8001", "192.0.2.2:8001"]


async def test_tritons_come_and_go_with_the_addresses_of_a_name(names: Names, pool: TritonPool) -> None:
    names.addresses["gpus"] = ["192.0.2.1", "192.0.2.2"]
    membership = Membership(pool, ["dns:///gpus:8001"], connect)
    await membership.refresh()
    gone, stays = pool.servers
    names.addresses["gpus"] = ["192.0.2.2", "192.0.2.3"]
    await membership.refresh()

    assert addresses(pool) == ["192.0.2.2:8001", "192.0.2.3:8001"]
    assert pool.servers[0] is stays
    assert pool.leaving == [gone]
    await pool.refresh()
    assert pool.leaving == []


async def test_a_triton_that_is_gone_may_end_its_calls(names: Names, pool: TritonPool) -> None:
    names.addresses["gpus"] = ["192.0.2.1"]
    membership = Membership(pool, ["dns:///gpus:8001"], connect)
    await membership.refresh()
    served = pool.servers[0].model("tiny")
    served.begin(2)
    names.addresses["gpus"] = ["192.0.2.2"]
    await membership.refresh()
    await pool.refresh()
    assert [server.address for server in pool.leaving] == ["192.0.2.1:8001"]
    found = pool.find(SPEC, lambda _: 1)
    assert found is not None
    assert found.server is pool.servers[0]
    served.images = 0
    await pool.refresh()

    assert pool.leaving == []


async def test_a_resolver_that_fails_takes_no_triton_away(names: Names, pool: TritonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, membership_module)
    names.addresses["gpus"] = ["192.0.2.1"]
    membership = Membership(pool, ["dns:///gpus:8001"], connect)
    await membership.refresh()
    del names.addresses["gpus"]
    for _ in range(3):
        await membership.refresh()

    assert addresses(pool) == ["192.0.2.1:8001"]
    assert [call.kwargs["name"] for call in log if call.method_name == "warning"] == ["dns:///gpus:8001"]


async def test_names_are_resolved_again_every_few_seconds(names: Names, pool: TritonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are resolved sooner while a Triton cannot be reached, because its name may have another address by now."""
    clock = CountingClock(monkeypatch, "app.triton.membership")
    monkeypatch.setattr(membership_module, "_SOON_SECONDS", 0.01)
    names.addresses["gpus"] = ["127.0.0.1"]
    async with serving(FakeTriton()) as port:
        membership = Membership(pool, [f"dns:///gpus:{port}"], connect)
        await membership.refresh()
        await eventually(lambda: pool.servers[0].client.server is not None)
        running = asyncio.create_task(membership.run())
        await clock.is_read_again()
        assert names.asked == 1
        clock.now += 5
        await eventually(lambda: names.asked == 2)
        await clock.is_read_again()
        assert names.asked == 2

    await eventually(lambda: names.asked > 4)
    running.cancel()


async def test_addresses_without_names_need_no_resolving(pool: TritonPool) -> None:
    await Membership(pool, ["192.0.2.9:8001"], connect).run()
