"""Keep a pool in line with the addresses in the settings: a name may stand for any number of Tritons, and these change.

Names are resolved here and not by gRPC, which does so again only after half a minute, and two minutes after a failure.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import structlog

from app.triton.backend import TritonBackend
from app.triton.pool import TritonPool

DNS_PREFIX = "dns:///"
"""Of an address whose name is resolved to one Triton for each of its addresses."""
_RESOLVE_SECONDS = 5.0
# While there is no connection to one of them: the name may stand for another one by now.
_SOON_SECONDS = 1.0

LOG = structlog.get_logger()


class Target(NamedTuple):
    """Where a Triton is."""

    address: str
    """`host:port` of its gRPC endpoint."""
    host: str = ""
    """The host that its certificate must name; empty if that is the one in the address."""
    ips: tuple[str, ...] = ()
    """The IP addresses that the name in the address has, of which it uses the first that answers; empty if it is no name."""

    def replaces(self, known: "Target", server: TritonBackend) -> bool:
        """Return whether a name stands for another Triton than the one that is used; one that answers is not left for another."""
        old, new = set(known.ips), set(self.ips)
        return old.isdisjoint(new) if old and server.client.server is not None else old != new


async def resolve(address: str) -> list[Target]:
    """Return the Tritons at an address of the settings: one, or one for each address that a name has.

    Raises:
        OSError: The name cannot be resolved.
    """
    if not _has_name(address):
        return [Target(address)]
    host, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    host = host.strip("[]")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of it is too long for the encoding of names
        raise OSError(str(error)) from error
    ips = [str(entry[4][0]) for entry in found]
    if not address.startswith(DNS_PREFIX):
        return [Target(address, ips=tuple(dict.fromkeys(ips)))]
    return [Target(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in sorted(set(ips))]


def _has_name(address: str) -> bool:
    """Return whether the host of an address is a name, and not an IP address."""
    return not re.fullmatch(r"(\[.*\]|[0-9.]+):[0-9]+", address)


Connect = Callable[[Target], TritonBackend]
"""Connects to a Triton."""


class Membership:
    """Adds Tritons to a pool, and removes them."""

    def __init__(self, pool: TritonPool, addresses: Sequence[str], connect: Connect) -> None:
        """Start without any.

        Args:
            pool: Gets the Tritons.
            addresses: Each is `host:port` or `dns:///name:port`.
            connect: Connects to a Triton.
        """
        self._pool = pool
        self._connect = connect
        self._addresses = addresses
        self._found: dict[str, list[Target]] = {}
        """The Tritons at each address, the last time that there were any."""
        self._unresolved: set[str] = set()
        """Addresses whose name could not be resolved the last time."""
        self._members: dict[str, tuple[Target, TritonBackend]] = {}
        """By address."""
        self._resolved_at = 0.0

    async def run(self) -> None:
        """Resolve the names again and again, until cancelled."""
        while any(map(_has_name, self._addresses)):
            await asyncio.sleep(_SOON_SECONDS)
            is_lost = not self._members or any(server.client.server is None for _, server in self._members.values())
            if is_lost or monotonic() - self._resolved_at >= _RESOLVE_SECONDS:
                await self.refresh()

    async def refresh(self) -> None:
        """Resolve the names, and change the pool."""
        await asyncio.gather(*map(self._resolve, self._addresses))
        self._resolved_at = monotonic()
        by_address = {target.address: target for address in self._addresses for target in self._found.get(address, ())}
        for address, (known, server) in [*self._members.items()]:
            if address not in by_address or by_address[address].replaces(known, server):
                LOG.info("a Triton is gone", triton=address)
                del self._members[address]
                self._pool.remove(server)
        for address, target in by_address.items():
            if address not in self._members:
                LOG.info("a Triton is used", triton=address)
                server = self._connect(target)
                self._members[address] = target, server
                self._pool.add(server)

    async def _resolve(self, address: str) -> None:
        """Find the Tritons at an address; while there are none, the last ones stay, because the resolver may have failed."""
        try:
            self._found[address] = await resolve(address)
        except OSError as error:
            if address not in self._unresolved:
                LOG.warning("the name of Tritons cannot be resolved", name=address, reason=str(error))
            self._unresolved.add(address)
        else:
            self._unresolved.discard(address)
