"""Addresses of images, as callers write them: which of them may be used at all."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from app.errors import UrlNotAllowed

_SCHEME = re.compile(r"\s{0,64}[A-Za-z][A-Za-z0-9+.-]{0,31}://")
# The last label of a name begins with a letter, or else resolvers read 127.1 and 0x7f.1 as IP addresses.
_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)*[a-z][a-z0-9-]{0,62}")
_MAX_NAME = 253
_MAX_URL = 2048
# Parsing takes microseconds for each of them, on the event loop.
_MAX_UNESCAPED = 64
_UNESCAPED = re.compile(r"[^!#-;=?-_a-z~]")
_HTTPS_PORT = 443


class ImageAddress(NamedTuple):
    """The address of an image on an allowed host."""

    url: httpx.URL
    """Without fragment."""
    name: str
    """Of the host: in ASCII and lower case, without a final dot."""
    port: int


class AllowedHosts:
    """The hosts from which images may be fetched."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Allow hosts.

        Args:
            patterns: Names in lower case, `*.` and a name for all names below it, or `*` for all names; each with `:port`
                unless the port is 443.
        """
        self._patterns = frozenset(patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __contains__(self, host: tuple[str, int]) -> bool:
        """Return whether a name, in lower case, and a port are allowed."""
        name, port = host
        _, *parents = (name.split(".", depth)[-1] for depth in range(name.count(".") + 1))
        forms = (name, *(f"*.{parent}" for parent in parents), "*")
        suffixes = ("", f":{port}") if port == _HTTPS_PORT else (f":{port}",)
        return any(form + suffix in self._patterns for form in forms for suffix in suffixes)


def is_address(text: str) -> bool:
    """Return whether a text begins like a URL, such as `https://`. Base64 and data URLs never do.

    Space around an address, which is easily copied with it, does not count.
    """
    return _SCHEME.match(text) is not None


def is_empty(text: str) -> bool:
    """Return whether a text is no address, but what a form sends for a field that was not filled in."""
    return not text or text.isspace()


def parse(url: str, hosts: AllowedHosts, base: ImageAddress | None = None) -> ImageAddress:
    """Parse the address of an image.

    Args:
        url: The address; of a redirect, it may be relative.
        hosts: The hosts that are allowed.
        base: What redirects there, if anything does.

    Raises:
        UrlNotAllowed: It is not an https URL of an allowed host.
    """
    url = url.strip()
    if len(url) > _MAX_URL:
        raise UrlNotAllowed(f"the address of an image has at most {_MAX_URL} characters")
    if len(_UNESCAPED.findall(url)) > _MAX_UNESCAPED:
        raise UrlNotAllowed("the address of an image has too many characters that URLs cannot contain; percent-encode them")
    try:
        parsed = httpx.URL(url) if base is None else base.url.join(url)
        name = parsed.raw_host.decode("ascii").lower().removesuffix(".")
        parsed = parsed.copy_with(host=name, fragment=None)
    except (httpx.InvalidURL, ValueError):  # whose texts repeat parts of the URL, which may be secret
        raise _not_https() from None
    if parsed.scheme != "https":
        raise _not_https()
    if parsed.userinfo:
        raise UrlNotAllowed("the address of an image must not contain a user name or password")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise UrlNotAllowed("the address of an image must name its host, and not by an IP address")
    port = _HTTPS_PORT if parsed.port is None else parsed.port
    if (name, port) not in hosts:
        raise UrlNotAllowed("images are not fetched from this host and port; NEREID_URL_HOSTS lists those that are allowed")
    return ImageAddress(parsed, name, port)


def _not_https() -> UrlNotAllowed:
    return UrlNotAllowed("expected the address of an image, such as https://example.org/image.jpg; only https is supported")
