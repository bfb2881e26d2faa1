"""Update a pool from the addresses in the settings, whose host names may resolve to several Tritons, and to others later.

Names are resolved here because gRPC resolves a name again only after half a minute, or two minutes after a failure.
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
"""Prefix of an address whose host name stands for one Triton per IP address."""
_RESOLVE_SECONDS = 5.0
# Interval while a Triton is not connected: its name may have another IP address by now.
_SOON_SECONDS = 1.0

LOG = structlog.get_logger()


class Target(NamedTuple):
    """The address of a Triton, as resolved."""

    address: str
    """`host:port` or `unix:/path` of its gRPC endpoint."""
    host: str = ""
    """The host that Triton's certificate must name; empty for the host in the address."""
    ips: tuple[str, ...] = ()
    """IP addresses of the host in the address, in order of preference; empty if the host is an IP address itself."""

    def replaces(self, known: "Target", server: TritonBackend) -> bool:
        """Return whether all IP addresses of the known target have changed or, if its Triton is not connected, any of them."""
        old, new = set(known.ips), set(self.ips)
        return old.isdisjoint(new) if old and server.client.server is not None else old != new


async def resolve(address: str) -> list[Target]:
    """Resolve an address of the settings to one Triton or, with `DNS_PREFIX`, to one per IP address; raises OSError."""
    if not _has_name(address):
        return [Target(address)]
    host, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    host = host.strip("[]")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of the name is too long
        raise OSError(str(error)) from error
    ips = [str(entry[4][0]) for entry in found]
    if not address.startswith(DNS_PREFIX):
        return [Target(address, ips=tuple(dict.fromkeys(ips)))]
    return [Target(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in sorted(set(ips))]


def _has_name(address: str) -> bool:
    return not re.fullmatch(r"(\[.*\]|[0-9.]+):[0-9]+|unix:.*", address)


Connect = Callable[[Target], TritonBackend]


class Membership:
    """Adds Tritons to a pool, and removes them. Their addresses are those of the settings."""

    def __init__(self, pool: TritonPool, addresses: Sequence[str], connect: Connect) -> None:
        self._pool = pool
        self._connect = connect
        self._addresses = addresses
        self._found: dict[str, list[Target]] = {}
        """Targets by address of the settings, as last resolved."""
        self._unresolved: set[str] = set()
        """Addresses whose last resolution failed."""
        self._members: dict[str, tuple[Target, TritonBackend]] = {}
        """Tritons in the pool, by the address of their target."""
        self._resolved_at = 0.0

    async def run(self) -> None:
        """Refresh regularly until cancelled; return at once if no address contains a name."""
        while any(map(_has_name, self._addresses)):
            await asyncio.sleep(_SOON_SECONDS)
            is_lost = not self._members or any(server.client.server is None for _, server in self._members.values())
            if is_lost or monotonic() - self._resolved_at >= _RESOLVE_SECONDS:
                await self.refresh()

    async def refresh(self) -> None:
        """Resolve the names, and update the pool."""
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
        """Resolve an address; after a failure keep the last targets, because the resolver may be down."""
        try:
            self._found[address] = await resolve(address)
        except OSError as error:
            if address not in self._unresolved:
                LOG.warning("the name of Tritons cannot be resolved", name=address, reason=str(error))
            self._unresolved.add(address)
        else:
            self._unresolved.discard(address)
