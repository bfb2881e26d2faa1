"""URLs of images: parsing, and the check whether they are allowed."""

import re
from collections.abc import Collection
from typing import NamedTuple

import httpx

from app.errors import UrlNotAllowed

_SCHEME = re.compile(r"\s{0,64}[A-Za-z][A-Za-z0-9+.-]{0,31}://")
# The last label must begin with a letter, because resolvers interpret 127.1 and 0x7f.1 as IP addresses.
_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)*[a-z][a-z0-9-]{0,62}")
_MAX_NAME = 253
_MAX_URL = 2048
# Each takes microseconds of parsing on the event loop.
_MAX_UNESCAPED = 64
_UNESCAPED = re.compile(r"[^!#-;=?-_a-z~]")
_HTTPS_PORT = 443


class ImageAddress(NamedTuple):
    """The allowed URL of an image."""

    url: httpx.URL
    """The URL without fragment."""
    name: str
    """Name of the host, in ASCII and lower case, without a trailing dot."""
    port: int


def is_listed(name: str, port: int, patterns: Collection[str]) -> bool:
    """Return whether a host, whose name is in lower case, is allowed.

    The patterns are names in lower case, `*.NAME` for all subdomains of a name, or `*` for all names; each with `:port` unless the
    port is 443.
    """
    _, *parents = (name.split(".", depth)[-1] for depth in range(name.count(".") + 1))
    forms = (name, *(f"*.{parent}" for parent in parents), "*")
    suffixes = ("", f":{port}") if port == _HTTPS_PORT else (f":{port}",)
    return any(form + suffix in patterns for form in forms for suffix in suffixes)


def is_address(text: str) -> bool:
    """Return whether a text starts with a URL scheme, maybe after white space. Base64 and data URLs never do."""
    return _SCHEME.match(text) is not None


def parse(url: str, hosts: Collection[str], base: ImageAddress | None = None) -> ImageAddress:
    """Parse the URL of an image, from `base` if it is a redirect; raises UrlNotAllowed. The hosts are as for `is_listed`."""
    url = url.strip()
    if len(url) > _MAX_URL:
        raise UrlNotAllowed(f"the address of an image has at most {_MAX_URL} characters")
    if len(_UNESCAPED.findall(url)) > _MAX_UNESCAPED:
        raise UrlNotAllowed("the address of an image has too many characters that URLs cannot contain; percent-encode them")
    try:
        parsed = httpx.URL(url) if base is None else base.url.join(url)
        name = parsed.raw_host.decode("ascii").lower().removesuffix(".")
        parsed = parsed.copy_with(host=name, fragment=None)
    except (httpx.InvalidURL, ValueError):  # `from None`: their messages quote the URL, which may contain secrets
        raise _not_https() from None
    if parsed.userinfo:
        raise UrlNotAllowed("the address of an image must not contain a user name or password")
    if parsed.scheme != "https":
        raise _not_https()
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise UrlNotAllowed("the address of an image must name its host, and not by an IP address")
    port = _HTTPS_PORT if parsed.port is None else parsed.port
    if not is_listed(name, port, hosts):
        raise UrlNotAllowed("images are not fetched from this host and port; NEREID_URL_HOSTS lists those that are allowed")
    return ImageAddress(parsed, name, port)


def _not_https() -> UrlNotAllowed:
    return UrlNotAllowed("expected the address of an image, such as https://example.org/image.jpg; only https is supported")
