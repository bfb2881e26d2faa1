"""Which IP addresses images may be fetched from, by all or by those who may use a private network."""

import pytest

from app.remote.public import is_public

PUBLIC = "93.184.215.14 1.1.1.1 2606:2800:21f:cb07:6820:80da:af6b:8b2c 2001:4860:4860::8888"
# This host and network, private networks, metadata of clouds, documentation, multicast, and what is reserved.
NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.8 192.0.0.10 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1
224.0.0.1 233.252.0.1 239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 100::1 2001::1 2001:10::1 2001:20::1 2001:db8::1
3fff::1 5f00::1 fc00::1 fd12:3456::1 fd00:ec2::254 fd20:ce::254 fe80::1 fec0::1 ff02::1 ff0e::1
"""
# IPv4 in IPv6: compatible, mapped, translated, NAT64, Teredo and 6to4.
EMBEDDED = """
::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::a00:1
2001:0:4136:e378:8000:63bf:3fff:fdd2 2002:7f00:1::1 2002:808:808::1
"""
NO_ADDRESS = ["", *["localhost", "0x7f.1", "127.1", "2130706433", "017700000001", "[::1]", "\u0661.1.1.1"]]
ZONES = ["fe80::1%eth0", "2606:2800:21f:cb07:6820:80da:af6b:8b2c%1", "::1%lo", "fd12:3456::1%1"]


@pytest.mark.parametrize("address", [*PUBLIC.split(), *NOT_PUBLIC.split(), *EMBEDDED.split(), *NO_ADDRESS, *ZONES])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    """Not those that contain an IPv4 address, even a public one, nor any with a zone or in a form that resolvers do not return."""
    assert is_public(address) is (address in PUBLIC.split())
