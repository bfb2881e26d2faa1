"""Fetching images from a real https host: what is connected to, what arrives, and what is refused on the way there."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence

import pytest

from app.errors import BodyTooLarge, GatewayError, GatewayFull, ImageNotFetched, UrlNotAllowed
from app.remote.fetcher import Fetcher
from app.remote.public import is_public
from app.resilience.deadline import Deadline
from tests.fakes.https import HOST, LOOPBACK, Host, redirect, response, serving
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
    async with serving(HOST, "cdn.example.org") as host:
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


NOT_PUBLIC = "the host of the image has no IP address that may be connected to"


@pytest.mark.parametrize("addresses", [["169.254.169.254"], [LOOPBACK, "10.0.0.1"], ["no address"], []])
async def test_name_with_an_address_that_is_not_public_is_refused(host: Host, addresses: list[str]) -> None:
    """Even if it has others; a caller cannot tell this from a name that does not exist."""
    host.names[HOST] = addresses
    refused = await failure(host.fetcher(), host.url())
    unknown = await failure(host.fetcher(), host.url(host="nowhere.example.org"))

    assert isinstance(refused, ImageNotFetched)
    assert refused.detail == unknown.detail == NOT_PUBLIC
    assert refused.__cause__ is unknown.__cause__ is None
    assert not host.requests


async def test_loopback_is_not_public(host: Host) -> None:
    fetcher = host.fetcher(resolve=None, is_allowed=is_public)
    for name in (HOST, "localhost"):
        assert (await failure(fetcher, host.url(host=name))).detail == NOT_PUBLIC
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
    fetcher = host.fetcher(is_allowed=lambda found: found.startswith("127."))
    assert await fetch(fetcher, host.url()) == IMAGE
    port = free_port()
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
