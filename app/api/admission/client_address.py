"""The address of a client that is behind a proxy."""

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address

from litestar.types import HTTPScope

Proxies = tuple[IPv4Network | IPv6Network, ...]
"""Networks of proxies that are believed when they name their client."""


def client_address(scope: HTTPScope, headers: Mapping[bytes, bytes], proxies: Proxies) -> str:
    """Return the address of whoever has sent a request: as a trusted proxy names it, else that of the connection.

    Args:
        scope: Of the request.
        headers: Of the request; a proxy must replace whatever `X-Real-IP` it was sent.
        proxies: Those that are trusted. On a unix socket any is: the socket's permissions say who may connect.

    Returns:
        The address; empty if the connection is one to a unix socket, and the proxy names no client.
    """
    peer = (scope.get("client") or ("", 0))[0]
    named = headers.get(b"x-real-ip")
    if named is None or not (peer == "" or _is_in(peer, proxies)):
        return peer
    try:
        return str(ip_address(named.decode("latin-1")))
    except ValueError:
        return peer


def _is_in(peer: str, networks: Proxies) -> bool:
    if not networks:
        return False
    address = ip_address(peer)
    address = getattr(address, "ipv4_mapped", None) or address  # of a socket for both versions
    return any(address in network for network in networks)
