"""Classification of IP addresses: public internet or private networks."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_UNICAST_V6 = ip_network("2000::/3")  # without mapped IPv4 (::ffff:0:0/96), NAT64 (64:ff9b::/96, 64:ff9b:1::/48) and multicast
# Networks that `is_global` treats as global in some version of Python.
_SPECIAL = (
    ip_network("100.64.0.0/10"),  # carrier-grade NAT; Alibaba Cloud's metadata
    ip_network("168.63.129.16/32"),  # Azure's platform services, reachable only from its virtual machines
    ip_network("192.0.0.0/24"),  # protocol assignments; Oracle Cloud's metadata
    ip_network("192.88.99.0/24"),  # relays of 6to4
    ip_network("224.0.0.0/4"),  # multicast
    ip_network("240.0.0.0/4"),  # reserved, and broadcast
    ip_network("2001::/23"),  # protocol assignments, such as Teredo, which contains an IPv4 address
    ip_network("2001:db8::/32"),  # documentation
    ip_network("2002::/16"),  # 6to4, which contains an IPv4 address
    ip_network("3fff::/20"),  # documentation
)


def is_public(address: str) -> bool:
    """Return whether an IP address is in the public internet.

    IPv6 addresses that embed an IPv4 address are never public, because their destination depends on the network.
    """
    parsed = _parse(address)
    if parsed is None or (parsed.version == 6 and parsed not in _UNICAST_V6):  # noqa: PLR2004
        return False
    return parsed.is_global and not any(parsed in each for each in _SPECIAL)


def _parse(address: str) -> IPv4Address | IPv6Address | None:
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    return None if isinstance(parsed, IPv6Address) and parsed.scope_id is not None else parsed
