"""Fetch images by URL."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpcore
import httpx

from app import __version__
from app.errors import BodyTooLarge, GatewayFull, ImageNotFetched, UrlInputDisabled, UrlNotAllowed
from app.remote import address
from app.remote.address import ImageAddress
from app.remote.network import UNREACHABLE, CheckedNetwork, Resolve, system_resolver
from app.remote.public import is_public
from app.resilience.deadline import Deadline

# Concurrent fetches per worker; more wait.
_MAX_FETCHES = 16
_MAX_SECONDS = 10.0
_MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
# Each piece costs CPU time, so hosts must not send many pieces of a few bytes.
_SMALL_BYTES, _MAX_SMALL_PIECES = 256, 1024
_HEADERS = (
    ("Accept", "image/*, */*;q=0.1"),  # some servers respond with 406 if only images are accepted
    ("Accept-Encoding", "identity"),
    ("User-Agent", f"nereid/{__version__}"),
    ("Connection", "close"),
)


class Fetcher:
    """Fetches images for one worker. Each fetch opens its own connections, without proxies or cookies."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        max_bytes: int = 0,
        *,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to fetch from hosts, as for `address.is_listed`; by default with the system's resolver and authorities."""
        self._hosts = frozenset(hosts)
        self._max_bytes = max_bytes
        # A separate pool: lookups cannot be stopped, so hanging ones must delay only other lookups.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="resolve")
        self._resolve = resolve or system_resolver(self._threads)
        self._is_allowed = is_allowed
        # The default certificate authorities take memory and time to load, so they are loaded only if https is used.
        self._trust = trust or (httpx.create_ssl_context() if hosts else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self._slots = asyncio.Semaphore(_MAX_FETCHES)
        self.batch_slots = asyncio.Semaphore(_MAX_FETCHES // 2)
        """Held by images of batches, so that single images do not wait behind all of them."""

    def parse(self, url: str) -> ImageAddress:
        """Parse the URL of an image and check it, without using the network; raises UrlNotAllowed or UrlInputDisabled."""
        if not self._hosts:
            raise UrlInputDisabled(
                "this gateway does not fetch images; send the image itself (NEREID_URL_HOSTS would allow hosts to fetch from)"
            )
        return address.parse(url, self._hosts)

    async def fetch(self, image: ImageAddress, count: Callable[[int], object], deadline: Deadline) -> bytes:
        """Fetch an image, from `parse`, within 10 s; raises ImageNotFetched, BodyTooLarge, or GatewayFull if too many are fetched.

        `count` is called with the size of each received piece, and raises an error if there are too many bytes.
        """
        seconds = max(0.0, min(deadline.remaining, _MAX_SECONDS))
        has_begun = False
        try:
            async with asyncio.timeout(seconds), self._slots:
                has_begun = True
                return await self._follow(image, count)
        except TimeoutError:
            if not has_begun:
                raise GatewayFull("too many images are being fetched", "uploads") from None
            raise ImageNotFetched(f"the image did not arrive within {seconds:.3g} s") from None
        except httpcore.ConnectError as error:
            raise ImageNotFetched(UNREACHABLE) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError):
            # `from None`, because the log must not contain the error's message, which may quote the host.
            raise ImageNotFetched("the host of the image closed the connection, or did not answer as an HTTP server does") from None

    def close(self) -> None:
        """Cancel pending name lookups; running ones end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, image: ImageAddress, count: Callable[[int], object]) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            host = httpcore.Origin(image.url.raw_scheme, image.name.encode(), image.port)
            network = CheckedNetwork(self._resolve, self._is_allowed)
            async with httpcore.AsyncHTTPConnection(host, self._trust, network_backend=network) as connection:
                url = httpcore.URL(scheme=host.scheme, host=host.host, port=host.port, target=image.url.raw_path)
                headers = [("Host", image.url.netloc.decode("ascii")), *_HEADERS]
                response = await connection.handle_async_request(httpcore.Request("GET", url, headers=headers))
                network.awaits_head = False
                if response.status not in _REDIRECTS:
                    return await self._read(response, count)
            location = httpx.Headers(response.headers).get("Location", "")
            if not location:
                raise ImageNotFetched("the host redirects without saying to which address")
            try:
                image = address.parse(location, self._hosts, image)
            except UrlNotAllowed as error:
                raise ImageNotFetched(f"the host redirects to another address: {error.detail}") from None
        raise ImageNotFetched(f"the host redirects more than {_MAX_REDIRECTS} times")

    async def _read(self, response: httpcore.Response, count: Callable[[int], object]) -> bytes:
        headers = httpx.Headers(response.headers)
        if response.status != httpx.codes.OK:
            raise ImageNotFetched(f"the host of the image answered with status {response.status}")
        if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise ImageNotFetched("the host sent the image with a content encoding that was not asked for")
        declared = headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        received = 0
        async for piece in response.aiter_stream():
            received += len(piece)
            if received > self._max_bytes:
                raise self._too_large()
            count(len(piece))
            pieces.append(piece)
            if len(pieces) > _MAX_SMALL_PIECES and received < _SMALL_BYTES * len(pieces):
                raise ImageNotFetched("the host sends the image in pieces of a few bytes")
        if not received:
            raise ImageNotFetched("the host sent an empty body")
        return b"".join(pieces)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the limit is {round(self._max_bytes / 2**20, 3):g} MiB, also for an image that is fetched")
