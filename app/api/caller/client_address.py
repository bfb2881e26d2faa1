"""The address of a client behind proxies."""

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from litestar.types import HTTPScope

Proxies = tuple[IPv4Network | IPv6Network, ...]
Address = IPv4Address | IPv6Address

# The pairs of all elements of `Forwarded`; values with separators in them are quoted. Source: RFC 7239, 4 and 6.
_PAIR = re.compile(r'(?:^|\s*[;,])\s*([\w-]+)=("(?:\\.|[^"\\])*"|[^;,"]*)')
_WITH_PORT = re.compile(r"\[(.*)\](?::\d+)?|([\d.]+):\d+")
_MAX_HOPS = 32


def client_address(scope: HTTPScope, headers: Mapping[bytes, bytes], proxies: Proxies) -> str:
    """Return the client's address as trusted proxies, or one on a unix socket, tell it, else the peer address.

    `X-Real-IP` wins. Otherwise it is the last address in `X-Forwarded-For`, or in
    `Forwarded`, that is no trusted proxy: each proxy appends the one that it was called from. A proxy must
    remove those of the three headers that it does not write, because its client may have sent them.
    """
    peer = _peer(scope)
    if not _is_proxy(peer, proxies):
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


def is_trusted(scope: HTTPScope, proxies: Proxies) -> bool:
    """Return whether a request comes from a trusted proxy, or by a unix socket."""
    return _is_proxy(_peer(scope), proxies)


def _is_proxy(peer: str, proxies: Proxies) -> bool:
    return peer == "" or (proxies != () and _is_in(ip_address(peer), proxies))


def _peer(scope: HTTPScope) -> str:
    return str((scope.get("client") or ("", 0))[0]).removeprefix("::ffff:")  # of IPv4, at a socket of both families


def _hops(scope: HTTPScope, headers: Mapping[bytes, bytes]) -> Iterator[str]:
    """Yield the addresses that proxies have appended, the last one first."""
    name = next((name for name in (b"x-forwarded-for", b"forwarded") if name in headers), None)
    for value in (value.decode("latin-1") for key, value in reversed(list(scope["headers"])) if key == name):
        yield from reversed(value.split(",") if name == b"x-forwarded-for" else _forwarded_for(value.strip()))


def _forwarded_for(value: str) -> list[str]:
    at, hops = 0, []
    while at < len(value):
        if (match := _PAIR.match(value, at)) is None:
            return [""]  # which is no address
        hops += [match[2]] if match[1].lower() == "for" else []
        at = match.end()
    return hops


def _parse(text: str) -> Address | None:
    text = text.strip(' "')
    match = _WITH_PORT.fullmatch(text)
    try:
        address = ip_address(match[1] or match[2] if match else text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_in(address: Address, networks: Proxies) -> bool:
    return any(address in network for network in networks)
