"""Addresses of images, as callers write them."""

from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UrlNotAllowed
from app.remote.address import is_address, is_listed, parse

ANY = ["*"]
SECRET = "canary"  # noqa: S105 - in paths and queries


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


@pytest.mark.parametrize("url", ["", *NOT_HTTPS.split(), "https://a.org/ca\nnary", "https://a.org/canary\r\nHost: b.org"])
def test_schemes_other_than_https_are_rejected(url: str) -> None:
    with pytest.raises(UrlNotAllowed, match="only https is supported") as raised:
        parse(url, ANY)
    assert SECRET not in raised.value.detail
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["https://user@a.org/x", "https://user:canary@a.org/", "https://a.org\\@b.org/", "https://:x@a.org/"]
)
def test_user_names_and_passwords_are_rejected(url: str) -> None:
    """They would be sent, or would hide the host from a reader."""
    with pytest.raises(UrlNotAllowed, match="must not contain a user name or password"):
        parse(url, ANY)


HOSTS = """
127.0.0.1 127.1 2130706433 0x7f000001 0x7f.0.0.1 017700000001 93.184.215.14 93.184.215.14. [::1] [::ffff:169.254.169.254]
[fe80::1%25eth0] . a..org .a.org a.org.. ex%61mple.org a.-b *.a.org *
"""


@pytest.mark.parametrize("host", [*HOSTS.split(), "", "a b.org", "a" * 64 + ".org", "a." * 130 + "org"])
def test_host_is_named_by_a_name(host: str) -> None:
    with pytest.raises(UrlNotAllowed, match=r"must name its host|only https"):
        parse(f"https://{host}/x", ANY)


@pytest.mark.parametrize("host", ["b.org", "a.org.b.org", "a.org:0", "a.org:22"])
def test_other_hosts_and_ports_are_rejected(host: str) -> None:
    with pytest.raises(UrlNotAllowed, match="NEREID_URL_HOSTS lists"):
        parse(f"https://{host}/", ["a.org"])


def test_redirect_may_be_relative() -> None:
    base = parse("https://a.org/x/y?z", ANY)

    assert str(parse("w.jpg", ANY, base).url) == "https://a.org/x/w.jpg"
    assert str(parse("//b.org/w.jpg", ANY, base).url) == "https://b.org/w.jpg"
    with pytest.raises(UrlNotAllowed):
        parse("http://a.org/", ANY, base)
    with pytest.raises(UrlNotAllowed):
        parse("//b.org/", ["a.org"], base)


def test_long_address_is_rejected() -> None:
    with pytest.raises(UrlNotAllowed, match="at most 2048 characters"):
        parse("https://a.org/" + "x" * 2048, ANY)


@pytest.mark.parametrize("character", ["ä", "\n"])
def test_address_of_characters_that_no_url_has_is_rejected(character: str) -> None:
    """Before it is parsed, which would take milliseconds; a few of them are escaped."""
    with pytest.raises(UrlNotAllowed, match="percent-encode them"):
        parse(f"https://a.org/{character * 65}x", ANY)
    if character != "\n":
        assert str(parse(f"https://a.org/{character * 64}x", ANY).url) == f"https://a.org/{quote(character) * 64}x"


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
