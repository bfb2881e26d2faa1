"""Classification of IP addresses: public internet or private networks."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Networks that `is_global` treats as global in some version of Python.
_SPECIAL_V4 = tuple(
    map(
        IPv4Network,
        (
            "100.64.0.0/10",  # carrier-grade NAT; Alibaba Cloud's metadata
            "168.63.129.16/32",  # Azure's platform services, reachable only from its virtual machines
            "192.0.0.0/24",  # protocol assignments; Oracle Cloud's metadata
            "192.88.99.0/24",  # relays of 6to4
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_UNICAST_V6 = IPv6Network("2000::/3")  # without mapped IPv4 (::ffff:0:0/96), NAT64 (64:ff9b::/96, 64:ff9b:1::/48) and multicast
_SPECIAL_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, such as Teredo, which contains an IPv4 address
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4, which contains an IPv4 address
            "3fff::/20",  # documentation
        ),
    )
)

_PRIVATE: tuple[IPv4Network | IPv6Network, ...] = (
    *map(IPv4Network, ("10.0.0.0/8", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")),
    *map(IPv6Network, ("::1/128", "fc00::/7")),
)
_METADATA = tuple(map(IPv6Network, ("fd00:ec2::/32", "fd20:ce::/32")))  # AWS and Google Cloud, in private networks


def is_private(address: str) -> bool:
    """Return whether an IP address is loopback or in a private network, except known cloud metadata services.

    Link-local addresses are neither private nor public.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    has_zone = isinstance(parsed, IPv6Address) and parsed.scope_id is not None
    return not has_zone and any(parsed in network for network in _PRIVATE) and not any(parsed in network for network in _METADATA)


def is_public(address: str) -> bool:
    """Return whether an IP address is in the public internet.

    IPv6 addresses that embed an IPv4 address are never public, because their destination depends on the network.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        return parsed.is_global and not any(parsed in network for network in _SPECIAL_V4)
    is_unicast = parsed in _UNICAST_V6 and parsed.scope_id is None
    return is_unicast and parsed.is_global and not any(parsed in network for network in _SPECIAL_V6)
