"""Fetch images by their address, from public hosts only."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from app import __version__
from app.errors import BodyTooLarge, GatewayFull, ImageNotFetched, UrlInputDisabled, UrlNotAllowed
from app.remote import address
from app.remote.address import AllowedHosts, ImageAddress
from app.remote.public import is_public
from app.resilience.deadline import Deadline

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name, for a port; raises `OSError` if there are none."""

# Of one worker, at a time; others wait.
_MAX_FETCHES = 16
_MAX_SECONDS = 10.0
_MAX_REDIRECTS = 3
_MAX_ADDRESSES = 4
# For each of the addresses of a host.
_CONNECT_SECONDS = 3.0
# A host that sends a body in pieces of a few bytes would make each of them cost more CPU time than a photo.
_SMALL_BYTES, _MAX_SMALL_PIECES = 256, 1024
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "User-Agent": f"nereid/{__version__}",
    "Connection": "close",
}


class Fetcher:
    """Fetches images for one worker.

    Each connection is new and goes to an IP address that was checked, so that a name cannot come to mean another one in
    between. There are no proxies, cookies or credentials.
    """

    def __init__(
        self,
        hosts: Sequence[str] = (),
        max_bytes: int = 0,
        *,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to fetch.

        Args:
            hosts: The hosts that are allowed, as `AllowedHosts` takes them; none: nothing is fetched.
            max_bytes: Maximum size of an image.
            resolve: None for the system's resolver.
            is_allowed: Whether an IP address may be connected to.
            trust: Checks certificates; None for the usual authorities.
        """
        self._hosts = AllowedHosts(hosts)
        self._max_bytes = max_bytes
        self._resolve = resolve or self._ask_system
        self._is_allowed = is_allowed
        # Without hosts nobody is trusted; the usual authorities take memory, and time to load.
        self._trust = trust or (httpx.create_ssl_context() if hosts else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self._slots = asyncio.Semaphore(_MAX_FETCHES)
        # Of its own: a lookup cannot be stopped, and those that hang delay nothing but other lookups.
        self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="resolve")

    def parse(self, url: str) -> ImageAddress:
        """Parse the address of an image, as far as that can be judged without the network.

        Raises:
            UrlInputDisabled: No host is allowed.
            UrlNotAllowed: It is not an https URL of an allowed host.
        """
        if not self._hosts:
            raise UrlInputDisabled(
                "this gateway does not fetch images; send the image itself (NEREID_URL_HOSTS would allow hosts to fetch from)"
            )
        return address.parse(url, self._hosts)

    async def fetch(self, image: ImageAddress, count: Callable[[int], object], deadline: Deadline) -> bytes:
        """Fetch an image.

        Args:
            image: Its address, as `parse` returns it.
            count: Called with the number of bytes of each piece that arrives; raises if there are too many.
            deadline: That of the request; the time is limited to 10 s in any case.

        Raises:
            ImageNotFetched: The host, or the one it redirects to, did not deliver the image.
            BodyTooLarge: The image has too many bytes.
            GatewayFull: Too many images are being fetched.
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
        except (httpx.TransportError, ssl.SSLError):
            # Not `from error`: its text, which would be logged, may repeat what the host has sent.
            raise ImageNotFetched("the host of the image closed the connection, or did not answer as an HTTP server does") from None

    def close(self) -> None:
        """Forget lookups that have not begun; the others end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, image: ImageAddress, count: Callable[[int], object]) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            async with httpx.AsyncHTTPTransport(verify=self._trust, trust_env=False) as transport:
                response = await self._get(transport, image)
                try:
                    if response.status_code not in _REDIRECTS:
                        return await self._read(response, count)
                finally:
                    await response.aclose()
            try:
                image = address.parse(response.headers.get("Location", ""), self._hosts, image)
            except UrlNotAllowed as error:
                raise ImageNotFetched(f"the host redirects to another address: {error.detail}") from None
        raise ImageNotFetched(f"the host redirects more than {_MAX_REDIRECTS} times")

    async def _get(self, transport: httpx.AsyncHTTPTransport, image: ImageAddress) -> httpx.Response:
        """Send a request to the first of the host's IP addresses that can be connected to; return the head of the response."""
        headers = {"Host": image.url.netloc.decode("ascii"), **_HEADERS}
        extensions = {"sni_hostname": image.name, "timeout": {"connect": _CONNECT_SECONDS}}
        failure = None
        for number in await self._lookup(image):
            request = httpx.Request("GET", image.url.copy_with(host=number), headers=headers, extensions=extensions)
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise ImageNotFetched("the host of the image cannot be connected to, or has no valid certificate") from failure

    async def _lookup(self, image: ImageAddress) -> list[str]:
        """Return some of the IP addresses of a host."""
        try:
            found = list(dict.fromkeys(await self._resolve(image.name, image.port)))
        except (OSError, UnicodeError):
            found = []
        if not found or not all(map(self._is_allowed, found)):
            # The same in both cases: nobody is to find out which names exist in private networks.
            raise ImageNotFetched("the host of the image has no public address")
        return found[:_MAX_ADDRESSES]

    async def _ask_system(self, name: str, port: int) -> list[str]:
        def lookup() -> list[str]:
            # AI_ADDRCONFIG: no IPv6 addresses where there is no IPv6.
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            return [str(entry[4][0]) for entry in found]

        return await asyncio.get_running_loop().run_in_executor(self._threads, lookup)

    async def _read(self, response: httpx.Response, count: Callable[[int], object]) -> bytes:
        """Receive the body of a response, which must be an image as it is."""
        if response.status_code != httpx.codes.OK:
            raise ImageNotFetched(f"the host of the image answered with status {response.status_code}")
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise ImageNotFetched("the host sent the image with a content encoding that was not asked for")
        declared = response.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        received = 0
        async for piece in response.aiter_raw():
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
