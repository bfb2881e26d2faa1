"""Which addresses of images are allowed, and fetching them from a real https host: what arrives, and what is refused."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BodyTooLarge, GatewayError, GatewayFull, ImageNotFetched, UrlNotAllowed
from app.remote.address import is_address, is_listed, parse
from app.remote.fetcher import Fetcher
from app.remote.public import is_public
from app.resilience.deadline import Deadline
from tests.fakes.http import HOST, LOOPBACK, Host, redirect, response, serving_host
from tests.processes import PATIENCE_SECONDS
from tests.support import eventually, free_port

IMAGE = bytes(range(256)) * 300
"""What the host of the tests has at /cat.jpg."""


async def fetch(fetcher: Fetcher, url: str, seconds: float = PATIENCE_SECONDS) -> bytes:
    """Fetch as a request does; the bytes that were counted are those of the image."""
    counted: list[int] = []
    image = await fetcher.fetch(fetcher.parse(url), counted.append, Deadline.after(seconds))
    assert sum(counted) == len(image)
    return image


async def failure(fetcher: Fetcher, url: str, seconds: float = PATIENCE_SECONDS) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await fetch(fetcher, url, seconds)
    return raised.value


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving_host(HOST, "cdn.example.org") as host:
        host.answers["/cat.jpg"] = response(IMAGE, "200 OK", "Content-Type: image/jpeg")
        yield host


async def test_image_is_fetched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a simple client: signatures are computed over path and query as they are. A proxy would resolve the name itself."""
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{free_port()}")
    target = "/a%2Fb/%C3%A4.jpg?X-Signature=%2B%3D&b=c+d"
    host.answers[target] = response(IMAGE)
    assert await fetch(host.fetcher(), host.url(target + "#part")) == IMAGE

    ((path, headers),) = host.requests
    assert path == target
    assert headers.pop("user-agent").startswith("nereid/")
    assert headers == {
        "host": f"{HOST}:{host.port}",
        "accept": "image/*, */*;q=0.1",
        "accept-encoding": "identity",
        "connection": "close",
    }


async def test_host_or_port_that_is_not_allowed_is_not_even_resolved(host: Host) -> None:
    for pattern in (f"*.example.com:{host.port}", "*", "images.example.org:1"):
        assert isinstance(await failure(host.fetcher(pattern), host.url()), UrlNotAllowed)
    assert not host.lookups


async def test_error_of_the_byte_count_ends_the_fetch(host: Host) -> None:
    def reject(_: int) -> None:
        raise GatewayFull("no memory", "memory")

    fetcher = host.fetcher()
    with pytest.raises(GatewayFull, match="no memory"):
        await fetcher.fetch(fetcher.parse(host.url()), reject, Deadline.after(10))
    await eventually(lambda: not host.open_connections)


@pytest.mark.parametrize("trusted", [True, False], ids=["another name", "another authority"])
async def test_certificate_must_be_valid_for_the_name(host: Host, *, trusted: bool) -> None:
    host.names["other.example.org"] = [LOOPBACK]
    fetcher = host.fetcher() if trusted else host.fetcher(trust=ssl.create_default_context())
    error = await failure(fetcher, host.url(host="other.example.org" if trusted else HOST))

    assert isinstance(error, ImageNotFetched)
    assert "no valid certificate" in error.detail
    assert not host.requests


async def test_redirects_are_followed(host: Host) -> None:
    host.names["cdn.example.org"] = [LOOPBACK]
    host.answers["/there"] = redirect(host.url("/cat.jpg", "cdn.example.org"), "308 Permanent Redirect")
    host.answers["/here"] = redirect("there?", "302 Found")
    host.answers["/there?"] = host.answers["/there"]

    assert await fetch(host.fetcher(), host.url("/here")) == IMAGE
    assert [headers["host"] for _, headers in host.requests] == [f"{name}:{host.port}" for name in (HOST, HOST, "cdn.example.org")]
    assert host.lookups == {HOST: 2, "cdn.example.org": 1}


async def test_at_most_three_redirects_are_followed(host: Host) -> None:
    for number in range(4):
        host.answers[f"/{number}"] = redirect(f"/{number + 1}")
    host.answers["/4"] = response(IMAGE)

    assert await fetch(host.fetcher(), host.url("/1")) == IMAGE
    assert (await failure(host.fetcher(), host.url("/0"))).detail == "the host redirects more than 3 times"


@pytest.mark.parametrize(
    ("location", "detail"),
    [
        ("http://images.example.org/canary", "only https"),
        ("https://169.254.169.254/canary", "must name its host"),
        ("https://canary@images.example.org:{}/", "user name"),
        ("https://internal.example.org/canary", "NEREID_URL_HOSTS"),
        ("https://images.example.org/canary", "NEREID_URL_HOSTS"),  # port 443
        ("https://internal.example.net:{}/canary", "no IP address"),
    ],
)
async def test_redirects_are_checked_like_the_first_address(host: Host, location: str, detail: str) -> None:
    host.names["internal.example.net"] = ["192.168.0.1"]
    host.answers["/redirect"] = redirect(location.format(host.port))
    error = await failure(host.fetcher(), host.url("/redirect"))

    assert isinstance(error, ImageNotFetched)
    assert detail in error.detail
    assert "canary" not in error.detail
    assert len(host.requests) == 1


@pytest.mark.parametrize("headers", [["Content-Length: 1048577"], []], ids=["declared", "streamed"])
async def test_image_above_the_limit_is_too_large(host: Host, headers: list[str]) -> None:
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write("\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode())
        while sent < 2**26:
            writer.write(bytes(2**16))
            await writer.drain()
            sent += 2**16

    host.answers["/cat.jpg"] = answer
    error = await failure(host.fetcher(max_bytes=2**20), host.url())

    assert isinstance(error, BodyTooLarge)
    assert "1 MiB" in error.detail
    await eventually(lambda: not host.open_connections)
    assert sent < 2**25
    host.answers["/cat.jpg"] = response(IMAGE)
    assert await fetch(host.fetcher(max_bytes=len(IMAGE)), host.url()) == IMAGE
    assert isinstance(await failure(host.fetcher(max_bytes=len(IMAGE) - 1), host.url()), BodyTooLarge)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        *(
            (response(b"" if status[:3] in {"204", "304"} else b"canary", status), f"answered with status {status[:3]}")
            for status in ("204 No Content", "206 Partial")
        ),
        (response(IMAGE, "200 OK", "Content-Encoding: gzip"), "content encoding"),
        (response(IMAGE[:-1], "200 OK", f"Content-Length: {len(IMAGE)}"), "closed the connection"),
        (response(b"5\r\ncanary", "200 OK", "Transfer-Encoding: chunked"), "closed the connection"),
        (response(b"1\r\nx\r\n" * 100_000, "200 OK", "Transfer-Encoding: chunked"), "pieces of a few bytes"),  # costs CPU time
        (b"HTTP/1.1 200 OK\r\nX: " + b"canary" * 30_000, "closed the connection"),
    ],
)
async def test_broken_answer_is_an_error(host: Host, answer: bytes, detail: str) -> None:
    host.answers["/cat.jpg"] = answer
    error = await failure(host.fetcher(), host.url())

    assert isinstance(error, ImageNotFetched)
    assert detail in error.detail
    assert "canary" not in error.detail
    assert error.__cause__ is None


async def test_time_is_limited_in_total(host: Host) -> None:
    """A host that sends a byte now and then cannot hold a request; its connection is closed."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def hang(_name: str, _port: int) -> Sequence[str]:
        return await asyncio.Future()

    host.answers["/cat.jpg"] = drip
    assert isinstance(await failure(host.fetcher(resolve=hang), host.url(), seconds=0.1), ImageNotFetched)
    error = await failure(host.fetcher(), host.url(), seconds=0.3)
    assert isinstance(error, ImageNotFetched)
    assert error.detail.startswith("the image did not arrive within 0.")
    await eventually(lambda: not host.open_connections)


async def test_fetches_wait_for_each_other(host: Host) -> None:
    release = asyncio.Event()

    async def wait(writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(response(IMAGE))

    host.answers["/slow"] = wait
    fetcher = host.fetcher()
    slow = [asyncio.create_task(fetch(fetcher, host.url("/slow"))) for _ in range(16)]
    await eventually(lambda: host.open_connections == 16)

    error = await failure(fetcher, host.url(), seconds=0.1)
    assert isinstance(error, GatewayFull)
    assert error.reason == "uploads"

    patient = asyncio.create_task(fetch(fetcher, host.url()))
    release.set()
    assert set(await asyncio.gather(*slow, patient)) == {IMAGE}


REFUSED = "the host of the image has no IP address that may be connected to"


@pytest.mark.parametrize("addresses", [["169.254.169.254"], [LOOPBACK, "10.0.0.1"], ["no address"], []])
async def test_name_with_an_address_that_is_not_public_is_refused(host: Host, addresses: list[str]) -> None:
    """Even if it has others; a caller cannot tell this from a name that does not exist."""
    host.names[HOST] = addresses
    refused = await failure(host.fetcher(), host.url())
    unknown = await failure(host.fetcher(), host.url(host="nowhere.example.org"))

    assert isinstance(refused, ImageNotFetched)
    assert refused.detail == unknown.detail == REFUSED
    assert refused.__cause__ is unknown.__cause__ is None
    assert not host.requests


async def test_loopback_is_not_public(host: Host) -> None:
    fetcher = host.fetcher(resolve=None, is_allowed=is_public)
    for name in (HOST, "localhost"):
        assert (await failure(fetcher, host.url(host=name))).detail == REFUSED
    assert not host.requests
    fetcher.close()


async def test_name_is_resolved_once(host: Host) -> None:
    answers = iter([[LOOPBACK], ["169.254.169.254"]])

    async def rebind(_name: str, _port: int) -> Sequence[str]:
        return next(answers)

    assert await fetch(host.fetcher(resolve=rebind), host.url()) == IMAGE
    assert next(answers) == ["169.254.169.254"]


async def test_next_address_is_tried_if_one_cannot_be_connected_to(host: Host) -> None:
    """If none listens, the text is that of an invalid certificate, so that callers cannot scan ports."""
    host.names[HOST] = ["127.0.0.2", LOOPBACK]
    assert await fetch(host.fetcher(is_allowed=lambda found: found.startswith("127.")), host.url()) == IMAGE
    host.names[HOST], port = [LOOPBACK], free_port()
    assert "no valid certificate" in (await failure(host.fetcher(f"*:{port}"), f"https://{HOST}:{port}/")).detail


async def test_head_without_end_is_an_error(host: Host) -> None:
    """A client accepts any number of informational responses, and each costs CPU time."""

    async def inform(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
            await writer.drain()

    host.answers["/cat.jpg"] = inform
    assert "did not answer as an HTTP server does" in (await failure(host.fetcher(), host.url())).detail
    await eventually(lambda: not host.open_connections)


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
