"""Addresses in the settings become Tritons in the pool; the IP addresses of a name may change."""

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
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
from tests.support import TABLE, eventually


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


@pytest.mark.parametrize("name", ["nowhere.invalid", f"{'x' * 70}.example.org.invalid"])
@pytest.mark.usefixtures("names")
async def test_name_that_does_not_exist_is_an_error(name: str) -> None:
    with pytest.raises(OSError, match=r"."):
        await resolve(f"dns:///{name}:8001")


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


@pytest.mark.parametrize(
    ("is_connected", "known", "found", "replaces"),
    [
        (True, ("a", "b"), ("b", "c"), False),  # not all addresses are always returned
        (True, ("a", "b"), ("c",), True),
        (False, ("a", "b"), ("b", "a"), False),
        (False, ("a", "b"), ("b", "c"), True),
        (True, (), (), False),
    ],
)
def test_triton_that_answers_stays_while_its_name_has_an_address_of_it(
    known: tuple[str, ...], found: tuple[str, ...], *, is_connected: bool, replaces: bool
) -> None:
    server: Any = SimpleNamespace(client=SimpleNamespace(server=object() if is_connected else None))

    assert Target("gpu:8001", ips=found).replaces(Target("gpu:8001", ips=known), server) is replaces


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
