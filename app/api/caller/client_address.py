"""The address of a client behind proxies."""

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from litestar.types import HTTPScope

Proxies = tuple[IPv4Network | IPv6Network, ...]
Address = IPv4Address | IPv6Address

# Each element of `Forwarded` has pairs, of which `for` is an address, in quotes if it has colons. Source: RFC 7239, 4 and 6.
_FORWARDED_FOR = re.compile(r'(?:^|[;,])\s*for=("[^"]*"|[^;,]*)', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[(.*)\](?::\d+)?|([\d.]+):\d+")
_MAX_HOPS = 32


def client_address(scope: HTTPScope, headers: Mapping[bytes, bytes], proxies: Proxies) -> str:
    """Return the client's address as trusted proxies, or one on a unix socket, tell it, else the peer address.

    `X-Real-IP` wins: a proxy must replace any that its client sent. Otherwise it is the last address in `X-Forwarded-For`, or in
    `Forwarded`, that is no trusted proxy: each proxy appends the one that it was called from.
    """
    peer = (scope.get("client") or ("", 0))[0]
    if not (peer == "" or (proxies and _is_in(ip_address(peer), proxies))):
        return peer
    if (named := headers.get(b"x-real-ip")) is not None:
        return str(_parse(named.decode("latin-1")) or peer)
    address = None
    for _, hop in zip(range(_MAX_HOPS), _hops(scope, headers), strict=False):
        if (parsed := _parse(hop)) is None:
            break
        address = parsed
        if not _is_in(address, proxies):
            break
    return str(address or peer)


def _hops(scope: HTTPScope, headers: Mapping[bytes, bytes]) -> Iterator[str]:
    """Yield the addresses that proxies have appended, the last one first."""
    name = next((name for name in (b"x-forwarded-for", b"forwarded") if name in headers), None)
    for value in (value.decode("latin-1") for key, value in reversed(list(scope["headers"])) if key == name):
        yield from reversed(value.split(",") if name == b"x-forwarded-for" else _FORWARDED_FOR.findall(value))


def _parse(text: str) -> Address | None:
    text = text.strip(' "')
    match = _WITH_PORT.fullmatch(text)
    try:
        address = ip_address(match[1] or match[2] if match else text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_in(address: Address, networks: Proxies) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address  # a dual-stack socket reports IPv4 peers this way
    return any(address in network for network in networks)
