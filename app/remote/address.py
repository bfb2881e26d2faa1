"""URLs of images: parsing, and the check whether they are allowed."""

import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from app.errors import UrlNotAllowed
from app.remote.public import is_private, is_public
from app.resilience import last_valid

_SCHEME = re.compile(r"\s{0,64}[A-Za-z][A-Za-z0-9+.-]{0,31}://")
# The last label must begin with a letter, because resolvers interpret 127.1 and 0x7f.1 as IP addresses.
_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)*[a-z][a-z0-9-]{0,62}")
_MAX_NAME = 253
_MAX_PORT = 65535
_MAX_URL = 2048
# Each takes microseconds of parsing on the event loop.
_MAX_UNESCAPED = 64
_UNESCAPED = re.compile(r"[^!#-;=?-_a-z~]")
_HTTPS_PORT = 443
_PORTS = {"http": 80, "https": _HTTPS_PORT}


class TrustedOrigin(NamedTuple):
    """An origin from the settings. Images from exactly this origin may use http and private IP addresses.

    Only URLs from `parse`, which only a dialect calls, are trusted, and redirects from them within this origin.
    """

    url: str
    """Base of relative URLs, without a trailing slash."""
    scheme: str
    name: str
    port: int
    authorization: str = ""
    """The `Authorization` header, sent only to this origin; empty for none."""

    def parse(self, url: str) -> "ImageAddress | None":
        """Parse the URL of an image, which may be relative with `/`; return None if it has another origin.

        Raises:
            UrlNotAllowed: It is not a URL, or has a user name or password.
        """
        url = url.strip()
        return self.accept(_read(self.url + url if url.startswith("/") else url))

    def accept(self, image: "ImageAddress") -> "ImageAddress | None":
        """Return the address marked as trusted; None if it has another origin."""
        is_here = (image.url.scheme, image.name, image.port) == (self.scheme, self.name, self.port)
        return image._replace(origin=self) if is_here else None


class ImageAddress(NamedTuple):
    """The allowed URL of an image."""

    url: httpx.URL
    """The URL without fragment."""
    name: str
    """Name of the host, in ASCII and lower case, without a trailing dot."""
    port: int
    origin: TrustedOrigin | None = None
    """The trusted origin of the URL; None if its host is one of the allowed hosts."""


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
    """Return whether a text starts with a URL scheme, such as `https://`. Base64 and data URLs never do.

    Leading white space, which is easily copied with a URL, is ignored.
    """
    return _SCHEME.match(text) is not None


def parse(url: str, hosts: Collection[str], base: ImageAddress | None = None) -> ImageAddress:
    """Parse the URL of an image; that of a redirect from `base` may be relative. The hosts are patterns, as for `is_listed`.

    Raises:
        UrlNotAllowed: It is not an https URL of an allowed host, and not a redirect within a trusted origin.
    """
    image = _read(url, base)
    # Trust passes only from one address of the origin to the next. A chain of redirects that leaves the origin is checked like any
    # other URL, even if it returns.
    if base is not None and base.origin is not None and (trusted := base.origin.accept(image)):
        return trusted
    if image.url.scheme != "https":
        raise _not_https()
    if not _is_name(image.name):
        raise UrlNotAllowed("the address of an image must name its host, and not by an IP address")
    if not is_listed(image.name, image.port, hosts):
        raise UrlNotAllowed("images are not fetched from this host and port; NEREID_URL_HOSTS lists those that are allowed")
    return image


def parse_origin(url: str, token_file: str = "") -> TrustedOrigin:
    """Parse the URL of an origin to trust; its host may be an IP address.

    The file has its access token, sent in the format of Django REST framework; empty for none.

    Raises:
        UrlNotAllowed: It is not an http or https URL, or has a user name or password.
        ValueError, OSError: The file cannot be read, or has no token, and no process of this host knows an earlier one.
    """
    expected = UrlNotAllowed("expected an http or https URL without user name and password, such as http://label-studio:8080")
    try:
        image = _read(url)
    except UrlNotAllowed:
        raise expected from None
    is_host = _is_name(image.name) or is_private(image.name) or is_public(image.name)
    if image.url.scheme not in _PORTS or not is_host or not 0 < image.port <= _MAX_PORT:
        raise expected
    origin = TrustedOrigin(str(image.url).rstrip("/"), image.url.scheme, image.name, image.port)
    if not token_file:
        return origin
    token = last_valid.load("label_studio_token", token_file, partial(_read_token, token_file), str, ValueError, OSError)
    return origin._replace(authorization=f"Token {token}")


def _read_token(file: str) -> str:
    token = Path(file).read_text(encoding="ascii").strip()
    if not token or not token.isprintable() or " " in token or token.startswith("eyJ"):  # a JWT: a personal access token
        raise ValueError("there is no legacy token in the file")
    return token


def _read(url: str, base: ImageAddress | None = None) -> ImageAddress:
    """Parse a URL without checking whether it is allowed."""
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
    port = _PORTS.get(parsed.scheme, 0) if parsed.port is None else parsed.port
    return ImageAddress(parsed, name, port)


def _is_name(host: str) -> bool:
    return len(host) <= _MAX_NAME and _NAME.fullmatch(host) is not None


def _not_https() -> UrlNotAllowed:
    return UrlNotAllowed("expected the address of an image, such as https://example.org/image.jpg; only https is supported")
