"""Addresses of images, as callers write them."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UrlNotAllowed
from app.remote.address import is_address, is_listed, parse

ANY = ["*"]


@pytest.mark.parametrize("text", ["https://a.org/x", "HTTP://a.org", "s3://bucket/key", "gopher://a"])
def test_urls_are_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize("text", ["QUJD", "//8A//8A", "data:image/png;base64,QUJD", "https:QUJD", "/9j/4AAQ", "://", "1a://b"])
def test_base64_and_data_urls_are_images_themselves(text: str) -> None:
    assert not is_address(text)


@pytest.mark.parametrize(
    ("patterns", "host", "expected"),
    [
        (["a.org"], ("a.org", 443), True),
        (["a.org"], ("b.a.org", 443), False),
        (["a.org"], ("a.org", 8443), False),
        (["a.org"], ("xa.org", 443), False),
        (["a.org:8443"], ("a.org", 8443), True),
        (["a.org:8443"], ("a.org", 443), False),
        (["*.a.org"], ("b.a.org", 443), True),
        (["*.a.org"], ("a.org", 443), False),
        (["*.a.org"], ("ba.org", 443), False),
        (["*.a.org"], ("a.org.evil.net", 443), False),
        (["*"], ("anything.net", 443), True),
        (["*"], ("anything.net", 22), False),
        (["b.org", "a.org"], ("a.org", 443), True),
        ([], ("a.org", 443), False),
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
        ("https://xn--a/", "https://xn--a/"),  # cannot be decoded, which nobody needs
        (f"https://a.org/{'ä' * 64}x", f"https://a.org/{'%C3%A4' * 64}x"),
        *((text, "https://a.org/x") for text in (" https://a.org/x", "https://a.org/x  ", "\n\thttps://a.org/x\r\n")),
    ],
)
def test_allowed_address_is_parsed(url: str, expected: str) -> None:
    parsed = parse(url, ANY)

    assert is_address(url)
    assert str(parsed.url) == expected
    assert parsed.name.encode() == parsed.url.raw_host
    assert parsed.port == 443


NOT_HTTPS = """
a.org/x.jpg //a.org/x.jpg http://a.org/canary ftp://a.org/canary file:///etc/canary gopher://a.org/canary https://a.org:x/canary
https://\uff11\uff12\uff17.0.0.1/canary https://[::1/canary
"""
WITH_USERS = "https://user@a.org/x https://user:canary@a.org/ https://a.org\\@b.org/ https://:x@a.org/"
"""They would be sent, or would hide the host from a reader."""
NO_NAMES = """
127.0.0.1 127.1 2130706433 0x7f000001 0x7f.0.0.1 017700000001 93.184.215.14 93.184.215.14. [::1] [::ffff:169.254.169.254]
[fe80::1%25eth0] . a..org .a.org a.org.. ex%61mple.org a.-b *.a.org *
"""
OTHER_HOSTS = "b.org:80 a.org.b.org:22 a.org:0 a.org:22"
REJECTED = [
    *(
        (url, "only https is supported")
        for url in ("", *NOT_HTTPS.split(), "https://a.org/ca\nnary", "https://a.org/canary\r\nHost: b")
    ),
    *((url, "must not contain a user name or password") for url in WITH_USERS.split()),
    *((f"https://{host}/x", "must name its host|only https") for host in (*NO_NAMES.split(), "", "a b.org", "a" * 64 + ".org")),
    *((f"https://{host}/x", "NEREID_URL_HOSTS lists") for host in OTHER_HOSTS.split()),
    ("https://a.org/" + "x" * 2048, "at most 2048 characters"),
    # Before they are parsed, which would take milliseconds; a few are escaped.
    *((f"https://a.org/{character * 65}x", "percent-encode them") for character in ("ä", "\n")),
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
