"""The target of load, always on this machine."""

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit


class Target(NamedTuple):
    """A server on this machine and the path of a request."""

    host: str
    port: int
    authority: str
    """Value of the Host header."""
    path: str
    """Path with the query."""


def parse_target(url: str) -> Target:
    """Parse a URL.

    Raises:
        ValueError: Its scheme is not http, or its host is not a loopback address.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http":
        raise ValueError(f"{url} does not start with http://")
    if not _is_loopback(host):
        raise ValueError(f"load may only be sent to this machine (127.0.0.1, ::1 or localhost), not to {host}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, parts.port or 80, parts.netloc, path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
