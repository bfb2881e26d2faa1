"""Which addresses are connected to, and how much a host may send before its response, in fetches from a real https host."""

import asyncio
from collections.abc import Sequence

import pytest

from app.errors import ImageNotFetched
from app.remote.public import is_public
from tests.fakes.https import HOST, LOOPBACK, Host
from tests.remote.support import IMAGE, failure, fetch
from tests.support import eventually, free_port

NOT_PUBLIC = "the host of the image has no IP address that may be connected to"


@pytest.mark.parametrize("addresses", [["169.254.169.254"], [LOOPBACK, "10.0.0.1"], ["10.0.0.1", LOOPBACK], ["no address"], []])
async def test_name_with_an_address_that_is_not_public_is_refused(host: Host, addresses: list[str]) -> None:
    """Even if it has others; a caller cannot tell this from a name that does not exist."""
    host.names[HOST] = addresses
    refused = await failure(host.fetcher(), host.url())
    unknown = await failure(host.fetcher(), host.url(host="nowhere.example.org"))

    assert isinstance(refused, ImageNotFetched)
    assert refused.detail == unknown.detail == NOT_PUBLIC
    assert refused.__cause__ is unknown.__cause__ is None
    assert not host.requests


async def test_loopback_is_not_public_unless_a_test_says_so(host: Host) -> None:
    error = await failure(host.fetcher(is_allowed=is_public), host.url())
    assert error.detail == NOT_PUBLIC

    fetcher = host.fetcher(resolve=None, is_allowed=is_public)
    error = await failure(fetcher, host.url(host="localhost"))
    assert error.detail == NOT_PUBLIC
    assert not host.requests
    fetcher.close()


async def test_system_resolves_names(host: Host) -> None:
    """In a thread; the certificate does not fit here."""
    fetcher = host.fetcher(resolve=None, is_allowed=lambda _: True)
    assert "localhost" in str((await failure(fetcher, host.url(host="localhost"))).__cause__)
    fetcher.close()


async def test_name_is_resolved_once(host: Host) -> None:
    answers = iter([[LOOPBACK], ["169.254.169.254"]])

    async def rebind(_name: str, _port: int) -> Sequence[str]:
        return next(answers)

    assert await fetch(host.fetcher(resolve=rebind), host.url()) == IMAGE
    assert next(answers) == ["169.254.169.254"]


async def test_next_address_is_tried_if_one_cannot_be_connected_to(host: Host) -> None:
    host.names[HOST] = ["127.0.0.2", LOOPBACK]
    fetcher = host.fetcher(is_allowed=lambda found: found.startswith("127."))

    assert await fetch(fetcher, host.url()) == IMAGE
    assert len(host.requests) == 1


async def test_host_that_does_not_listen_is_an_error(host: Host) -> None:
    """The text is that of an invalid certificate, so that callers cannot scan ports."""
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


async def test_resolver_that_hangs_is_not_waited_for(host: Host) -> None:
    """Resolving counts towards the time of the fetch."""

    async def hang(_name: str, _port: int) -> Sequence[str]:
        return await asyncio.Future()

    assert isinstance(await failure(host.fetcher(resolve=hang), host.url(), seconds=0.1), ImageNotFetched)
