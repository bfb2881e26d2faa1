"""Fetching images from a real https host: what arrives, and what is refused on the way there."""

import asyncio
import ssl

import pytest

from app.errors import BodyTooLarge, GatewayFull, ImageNotFetched, UrlInputDisabled, UrlNotAllowed
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from tests.fakes.https import HOST, LOOPBACK, Host, redirect, response
from tests.remote.support import IMAGE, failure, fetch
from tests.support import eventually, free_port


async def test_image_is_fetched(host: Host) -> None:
    """As by a simple client, which does not identify the gateway; signatures are computed over path and query as they are."""
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


async def test_no_image_is_fetched_unless_hosts_are_allowed(host: Host) -> None:
    error = await failure(Fetcher(), host.url())

    assert isinstance(error, UrlInputDisabled)
    assert "NEREID_URL_HOSTS" in error.detail


async def test_host_or_port_that_is_not_allowed_is_not_even_resolved(host: Host) -> None:
    for pattern in (f"*.example.com:{host.port}", "*", "images.example.org:1"):
        assert isinstance(await failure(host.fetcher(pattern), host.url()), UrlNotAllowed)
    assert not host.lookups


async def test_proxies_of_the_environment_are_not_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name itself, past the address check."""
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")

    assert await fetch(host.fetcher(), host.url()) == IMAGE


@pytest.mark.parametrize("trusted", [True, False], ids=["another name", "another authority"])
async def test_certificate_must_be_valid_for_the_name(host: Host, *, trusted: bool) -> None:
    host.names["other.example.org"] = [LOOPBACK]
    fetcher = host.fetcher() if trusted else host.fetcher(trust=ssl.create_default_context())
    error = await failure(fetcher, host.url(host="other.example.org" if trusted else HOST))

    assert isinstance(error, ImageNotFetched)
    assert "no valid certificate" in error.detail
    assert not host.requests


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "308 Permanent Redirect"])
async def test_redirects_are_followed(host: Host, status: str) -> None:
    host.names["cdn.example.org"] = [LOOPBACK]
    host.answers["/there"] = redirect(host.url("/cat.jpg", "cdn.example.org"), status)
    host.answers["/here"] = redirect("there?", status)
    host.answers["/there?"] = host.answers["/there"]

    assert await fetch(host.fetcher(), host.url("/here")) == IMAGE
    assert [headers["host"] for _, headers in host.requests] == [f"{name}:{host.port}" for name in (HOST, HOST, "cdn.example.org")]
    assert host.lookups == {HOST: 2, "cdn.example.org": 1}


async def test_at_most_three_redirects_are_followed(host: Host) -> None:
    for number in range(4):
        host.answers[f"/{number}"] = redirect(f"/{number + 1}")
    host.answers["/4"] = response(IMAGE)
    host.answers["/nowhere"] = response(b"", "302 Found")

    assert await fetch(host.fetcher(), host.url("/1")) == IMAGE
    assert (await failure(host.fetcher(), host.url("/0"))).detail == "the host redirects more than 3 times"
    assert (await failure(host.fetcher(), host.url("/nowhere"))).detail == "the host redirects without saying to which address"


@pytest.mark.parametrize(
    ("location", "detail"),
    [
        ("http://images.example.org/canary", "only https"),
        ("https://169.254.169.254/canary", "must name its host"),
        ("https://canary@images.example.org:{}/", "user name"),
        ("https://internal.example.org/canary", "NEREID_URL_HOSTS"),
        ("https://images.example.org/canary", "NEREID_URL_HOSTS"),  # port 443
        ("https://internal.example.net:{}/canary", "no IP address"),
        ("https://x" + "x" * 3000, "2048 characters"),
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
    for whole in (response(IMAGE), b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + IMAGE):
        host.answers["/cat.jpg"] = whole
        assert await fetch(host.fetcher(max_bytes=len(IMAGE)), host.url()) == IMAGE
        assert isinstance(await failure(host.fetcher(max_bytes=len(IMAGE) - 1), host.url()), BodyTooLarge)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        *(
            (response(b"" if status[:3] in {"204", "304"} else b"canary", status), f"answered with status {status[:3]}")
            for status in ("204 No Content", "206 Partial", "304 Not Modified", "500 Oops")
        ),
        (response(), "empty body"),
        (response(IMAGE, "200 OK", "Content-Encoding: gzip"), "content encoding"),
        (response(IMAGE[:-1], "200 OK", f"Content-Length: {len(IMAGE)}"), "closed the connection"),
        (response(b"5\r\ncanary", "200 OK", "Transfer-Encoding: chunked"), "closed the connection"),
        (response(b"1\r\nx\r\n" * 100_000, "200 OK", "Transfer-Encoding: chunked"), "pieces of a few bytes"),  # costs CPU time
        (b"SSH-2.0-canary\r\n", "closed the connection"),
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

    host.answers["/cat.jpg"] = drip
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


async def test_cancelled_fetches_close_their_connections(host: Host) -> None:
    host.answers["/hang"] = asyncio.StreamWriter.wait_closed
    fetcher = host.fetcher()
    fetches = [asyncio.create_task(fetch(fetcher, host.url("/hang"))) for _ in range(16)]
    await eventually(lambda: host.open_connections >= 16)
    for task in fetches:
        task.cancel()
    await asyncio.gather(*fetches, return_exceptions=True)

    assert await fetch(fetcher, host.url()) == IMAGE


async def test_error_of_the_byte_count_ends_the_fetch(host: Host) -> None:
    def reject(_: int) -> None:
        raise GatewayFull("no memory", "memory")

    fetcher = host.fetcher()
    with pytest.raises(GatewayFull, match="no memory"):
        await fetcher.fetch(fetcher.parse(host.url()), reject, Deadline.after(10))
    await eventually(lambda: not host.open_connections)
