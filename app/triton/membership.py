"""Keep a pool in line with the addresses in the settings: a name may stand for any number of Tritons, and these change."""

import asyncio
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


async def resolve(address: str) -> list[Target]:
    """Return the Tritons at an address of the settings: one, or one for each address that a name has.

    Raises:
        OSError: The name cannot be resolved.
    """
    if not address.startswith(DNS_PREFIX):
        return [Target(address)]
    host, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    host = host.strip("[]")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of it is too long for the encoding of names
        raise OSError(str(error)) from error
    ips = sorted({str(entry[4][0]) for entry in found})
    return [Target(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in ips]


Connect = Callable[[Target], TritonBackend]
"""Makes the client of a Triton."""


class Membership:
    """Adds Tritons to a pool, and removes them."""

    def __init__(self, pool: TritonPool, addresses: Sequence[str], connect: Connect) -> None:
        """Start without any.

        Args:
            pool: Gets the Tritons.
            addresses: Each is `host:port` or `dns:///name:port`.
            connect: Makes the client of a Triton.
        """
        self._pool = pool
        self._connect = connect
        self._addresses = addresses
        self._found: dict[str, list[Target]] = {}
        """The Tritons at each address, the last time that there were any."""
        self._unresolved: set[str] = set()
        """Addresses whose name could not be resolved the last time."""
        self._members: dict[str, TritonBackend] = {}
        """By address."""
        self._resolved_at = 0.0

    async def run(self) -> None:
        """Resolve the names again and again, until cancelled."""
        while any(address.startswith(DNS_PREFIX) for address in self._addresses):
            await asyncio.sleep(_SOON_SECONDS)
            is_lost = not self._members or any(server.client.server is None for server in self._members.values())
            if is_lost or monotonic() - self._resolved_at >= _RESOLVE_SECONDS:
                await self.refresh()

    async def refresh(self) -> None:
        """Resolve the names, and change the pool."""
        await asyncio.gather(*map(self._resolve, self._addresses))
        self._resolved_at = monotonic()
        by_address = {target.address: target for address in self._addresses for target in self._found.get(address, ())}
        for address in self._members.keys() - by_address.keys():
            LOG.info("a Triton is gone", triton=address)
            self._pool.remove(self._members.pop(address))
        for address, target in by_address.items():
            if address not in self._members:
                LOG.info("a Triton is used", triton=address)
                self._members[address] = self._connect(target)
                self._pool.add(self._members[address])

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
