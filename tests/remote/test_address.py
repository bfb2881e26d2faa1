"""Addresses of images, as callers write them."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UrlNotAllowed
from app.remote.address import is_address, is_listed, parse
from app.remote.public import is_public

ANY = ["*"]


@pytest.mark.parametrize("text", ["QUJD", "//8A//8A", "data:image/png;base64,QUJD", "https:QUJD", "/9j/4AAQ", "://", "1a://b"])
def test_base64_and_data_urls_are_images_themselves(text: str) -> None:
    assert not is_address(text)
    assert all(map(is_address, ("https://a.org/x", "HTTP://a.org", "s3://bucket/key")))


@pytest.mark.parametrize(
    ("patterns", "host", "expected"),
    [
        (["a.org"], ("a.org", 443), True),
        (["a.org"], ("b.a.org", 443), False),
        (["a.org"], ("a.org", 8443), False),
        (["a.org:8443"], ("a.org", 8443), True),
        (["*.a.org"], ("b.a.org", 443), True),
        (["*.a.org"], ("a.org", 443), False),
        (["*.a.org"], ("ba.org", 443), False),
        (["*.a.org"], ("a.org.evil.net", 443), False),
        (["*"], ("anything.net", 443), True),
        (["*"], ("anything.net", 22), False),
        (["b.org", "a.org"], ("a.org", 443), True),
    ],
)
def test_hosts_are_allowed_by_name_and_port(patterns: list[str], host: tuple[str, int], *, expected: bool) -> None:
    assert is_listed(*host, patterns) is expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a.org/x.jpg?size=5", "https://a.org/x.jpg?size=5"),
        ("HTTPS://A.ORG:443/x.jpg#part", "https://a.org/x.jpg"),
        ("https://a.org./x", "https://a.org/x"),
        ("https://bücher.example/ä", "https://xn--bcher-kva.example/%C3%A4"),
        (f"https://a.org/{'ä' * 64}x", f"https://a.org/{'%C3%A4' * 64}x"),
        ("\n\thttps://a.org/x\r\n", "https://a.org/x"),
    ],
)
def test_allowed_address_is_parsed(url: str, expected: str) -> None:
    parsed = parse(url, ANY)

    assert is_address(url)
    assert str(parsed.url) == expected
    assert parsed.name.encode() == parsed.url.raw_host
    assert parsed.port == 443


NOT_HTTPS = "a.org/x.jpg //a.org/x.jpg http://a.org/canary file:///etc/canary https://a.org:x/canary https://\uff11\uff12\uff17.0.0.1/canary"
WITH_USERS = "https://user@a.org/x https://user:canary@a.org/ https://a.org\\@b.org/"
"""They would be sent, or would hide the host from a reader."""
NO_NAMES = """
127.0.0.1 127.1 2130706433 0x7f000001 0x7f.0.0.1 017700000001 93.184.215.14. [::1] [::ffff:169.254.169.254]
[fe80::1%25eth0] . .a.org a.org.. ex%61mple.org a.-b *.a.org
"""
REJECTED = [
    *((url, "only https is supported") for url in ("", *NOT_HTTPS.split(), "https://a.org/canary\r\nHost: b")),
    *((url, "must not contain a user name or password") for url in WITH_USERS.split()),
    *((f"https://{host}/x", "must name its host|only https") for host in (*NO_NAMES.split(), "", "a" * 64 + ".org")),
    *((f"https://{host}/x", "NEREID_URL_HOSTS lists") for host in ("a.org.b.org:22", "a.org:0")),
    ("https://a.org/" + "x" * 2048, "at most 2048 characters"),
    ("https://a.org/" + "ä" * 65, "percent-encode them"),  # before they are parsed, which would take milliseconds
]


@pytest.mark.parametrize(("url", "message"), REJECTED)
def test_address_that_could_lead_elsewhere_is_rejected(url: str, message: str) -> None:
    with pytest.raises(UrlNotAllowed, match=message) as raised:
        parse(url, ANY)
    assert "canary" not in raised.value.detail
    assert raised.value.__cause__ is None


def test_redirect_may_be_relative() -> None:
    base = parse("https://a.org/x/y?z", ANY)

    assert str(parse("w.jpg", ANY, base).url) == "https://a.org/x/w.jpg"
    assert str(parse("//b.org/w.jpg", ANY, base).url) == "https://b.org/w.jpg"
    for url in ("http://a.org/", "//b.org/"):
        with pytest.raises(UrlNotAllowed):
            parse(url, ["a.org"], base)


@given(st.one_of(st.text(), st.text().map("https://{}".format), st.text(alphabet="ah.:/@[]%?#\\0*1").map("https://{}".format)))
def test_any_text_is_parsed_or_rejected(url: str) -> None:
    try:
        parsed = parse(url, ANY)
    except UrlNotAllowed:
        return
    assert parsed.url.scheme == "https"
    assert parsed.port == 443
    assert not parsed.url.userinfo
    assert httpx.URL(str(parsed.url)).raw_host == parsed.name.encode()


PUBLIC = "93.184.215.14 1.1.1.1 2606:2800:21f:cb07:6820:80da:af6b:8b2c 2001:4860:4860::8888"
# This host and network, private networks, metadata of clouds, documentation, multicast, and what is reserved.
NOT_PUBLIC = """
0.0.0.0 10.0.0.1 100.100.100.200 127.255.255.254 168.63.129.16 169.254.169.254 172.31.255.255 192.0.0.10 192.0.0.192 192.0.2.1
192.88.99.1 192.168.0.1 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 100::1 2001::1 2001:20::1 2001:db8::1
3fff::1 5f00::1 fd12:3456::1 fd00:ec2::254 fd20:ce::254 fe80::1 fec0::1 ff02::1
"""
# IPv4 in IPv6: compatible, mapped, translated, NAT64, Teredo and 6to4.
EMBEDDED = """
::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::808:808 64:ff9b:1::a00:1
2001:0:4136:e378:8000:63bf:3fff:fdd2 2002:808:808::1
"""
NO_ADDRESS = "localhost 0x7f.1 127.1 2130706433 017700000001 [::1] \u0661.1.1.1 fe80::1%eth0 2001:4860:4860::8888%1"


@pytest.mark.parametrize("address", [*PUBLIC.split(), *NOT_PUBLIC.split(), *EMBEDDED.split(), *NO_ADDRESS.split(), ""])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    """Not those that contain an IPv4 address, even a public one, nor any with a zone or in a form that resolvers do not return."""
    assert is_public(address) is (address in PUBLIC.split())
