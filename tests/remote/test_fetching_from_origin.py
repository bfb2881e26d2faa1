"""Fetching images from the one origin that a setting names, on a real host: http, private addresses, and nothing else."""

import ssl
from collections.abc import AsyncIterator

import pytest

from app.errors import ImageNotFetched, UrlInputDisabled, UrlNotAllowed
from app.remote.address import TrustedOrigin, parse_origin
from app.remote.fetcher import Fetcher
from app.remote.public import is_public
from app.resilience.deadline import Deadline
from tests.fakes.https import HOST, LOOPBACK, Host, redirect, response, serving
from tests.remote.support import IMAGE, failure, fetch

NAME = "label-studio"
TOKEN = "Token 0123456789abcdef"  # noqa: S105 - of nobody


@pytest.fixture(params=["http", "https"])
async def studio(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """A host on a private network that has one image."""
    async with serving(NAME, scheme=request.param) as host:
        host.names[NAME] = [LOOPBACK]
        host.answers["/cat.jpg"] = response(IMAGE)
        yield host


def origin_of(studio: Host, name: str = NAME) -> TrustedOrigin:
    return parse_origin(studio.url("", name))._replace(authorization=TOKEN)


def fetcher_of(studio: Host, origin: TrustedOrigin, **others: object) -> Fetcher:
    """Make a fetcher that takes loopback for what it is, and allows no other host."""
    trust = ssl.create_default_context()
    studio.authority.configure_trust(trust)
    return Fetcher((), 2**20, **{"resolve": studio.resolve, "trust": trust, "origin": origin, **others})  # type: ignore[arg-type]


async def get(fetcher: Fetcher, origin: TrustedOrigin, url: str) -> bytes:
    """Fetch as the Label Studio dialect does."""
    image = origin.parse(url)
    assert image is not None
    return await fetcher.fetch(image, lambda _: None, Deadline.after(10))


async def refusal(fetcher: Fetcher, origin: TrustedOrigin, url: str) -> str:
    """Return why an image was not fetched."""
    with pytest.raises(ImageNotFetched) as raised:
        await get(fetcher, origin, url)
    return raised.value.detail


async def test_an_image_is_fetched_from_a_private_address(studio: Host) -> None:
    """With the token, by a relative or by its whole address; redirects within the origin are followed."""
    origin = origin_of(studio)
    fetcher = fetcher_of(studio, origin)
    studio.answers |= {"/here": redirect("cat.jpg"), "/there": redirect(studio.url("/here", NAME))}

    for url in ("/cat.jpg", studio.url("/cat.jpg", "Label-Studio."), "/there"):
        assert await get(fetcher, origin, url) == IMAGE
    assert len(studio.requests) == 5
    assert {(sent["host"], sent["authorization"]) for _, sent in studio.requests} == {(f"{NAME}:{studio.port}", TOKEN)}
    assert studio.lookups == {NAME: 5}


async def test_the_origin_may_be_an_ip_address() -> None:
    async with serving(scheme="http") as studio:
        studio.answers["/cat.jpg"] = response(IMAGE)
        origin = parse_origin(studio.url("", LOOPBACK))
        fetcher = fetcher_of(studio, origin, resolve=None)

        assert await get(fetcher, origin, "/cat.jpg") == IMAGE
        assert "authorization" not in studio.requests[0][1]
        fetcher.close()


@pytest.mark.parametrize(
    "addresses",
    [["169.254.169.254"], ["fe80::1"], ["fe80::1%eth0"], ["fd00:ec2::254"], [LOOPBACK, "169.254.169.254"], ["0.0.0.0"], []],  # noqa: S104
)
async def test_addresses_of_metadata_are_refused(studio: Host, addresses: list[str]) -> None:
    """This holds even if the trusted name resolves to them among others."""
    studio.names[NAME] = addresses
    origin = origin_of(studio)

    assert "no IP address that may be connected to" in await refusal(fetcher_of(studio, origin), origin, "/cat.jpg")
    assert not studio.requests


async def test_others_may_not_use_the_origin(studio: Host) -> None:
    """What callers write is checked as ever; where the host is allowed for all, its private address and the token are not."""
    url = studio.url("/cat.jpg", NAME)
    origin = origin_of(studio)

    assert isinstance(await failure(fetcher_of(studio, origin), url), UrlInputDisabled)
    fetcher = studio.fetcher(origin=origin, is_allowed=is_public)
    assert isinstance(await failure(fetcher, url), UrlNotAllowed if studio.scheme == "http" else ImageNotFetched)
    assert not studio.requests
    if studio.scheme == "https":
        assert await fetch(studio.fetcher(origin=origin), url) == IMAGE
        assert "authorization" not in studio.requests[0][1]


@pytest.mark.parametrize(
    "location",
    [
        "http://label-studio:1/canary",
        "https://label-studio:1/canary",
        "//label-studio/canary",
        "http://other:{port}/canary",
        "https://other:{port}/canary",
        "{other}://label-studio:{port}/canary",
        "http://127.0.0.1:{port}/canary",
        "{scheme}://canary@label-studio:{port}/cat.jpg",
        "http://169.254.169.254/canary",
        "file:///etc/canary",
    ],
)
async def test_redirects_away_are_checked_like_any_address(studio: Host, location: str) -> None:
    """Another port or scheme is another origin."""
    schemes = ["http", "https"]
    schemes.remove(studio.scheme)
    place = location.format(port=studio.port, scheme=studio.scheme, other=schemes[0])
    studio.names["other"] = [LOOPBACK]
    studio.answers["/away"] = redirect(place)
    origin = origin_of(studio)
    detail = await refusal(fetcher_of(studio, origin), origin, "/away")

    assert detail.startswith("the host redirects to another address: ")
    assert "canary" not in detail
    assert len(studio.requests) == 1


async def test_what_has_left_the_origin_is_not_trusted_again(studio: Host) -> None:
    """A host to which it redirects gets no token; if that leads back, the origin is checked like any host, and gets none, too."""
    async with serving(HOST) as elsewhere:
        studio.names[HOST] = [LOOPBACK]
        elsewhere.answers |= {"/cat.jpg": response(IMAGE), "/back": redirect(studio.url("/cat.jpg", NAME))}
        studio.answers |= {"/out": redirect(elsewhere.url()), "/back": redirect(elsewhere.url("/back"))}
        origin, checked = origin_of(studio), list[str]()

        def is_allowed(found: str) -> bool:
            checked.append(found)
            return True

        trust = ssl.create_default_context()
        studio.authority.configure_trust(trust)
        elsewhere.authority.configure_trust(trust)
        hosts = [f"{HOST}:{elsewhere.port}", f"{NAME}:{studio.port}"]
        fetcher = studio.fetcher(*hosts, origin=origin, trust=trust, is_allowed=is_allowed)

        assert await get(fetcher, origin, "/out") == IMAGE
        if studio.scheme == "http":
            assert "only https" in await refusal(fetcher, origin, "/back")
        else:
            assert await get(fetcher, origin, "/back") == IMAGE
            assert "authorization" not in studio.requests.pop()[1]
        assert {headers["authorization"] for _, headers in studio.requests} == {TOKEN}
        assert not any("authorization" in headers for _, headers in elsewhere.requests)
        assert checked == [LOOPBACK] * (2 if studio.scheme == "http" else 3)
