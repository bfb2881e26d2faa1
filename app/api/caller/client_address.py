"""The address of a client behind a proxy."""

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_address

from litestar.types import HTTPScope

Proxies = tuple[IPv4Network | IPv6Network, ...]


def client_address(scope: HTTPScope, headers: Mapping[bytes, bytes], proxies: Proxies) -> str:
    """Return the client's address: `X-Real-IP` if a trusted proxy or a unix socket sent it, else the peer address.

    A proxy must replace any `X-Real-IP` that its client sent.
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
    address = getattr(address, "ipv4_mapped", None) or address  # a dual-stack socket reports IPv4 peers this way
    return any(address in network for network in networks)
