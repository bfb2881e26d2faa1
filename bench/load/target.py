"""The target of load."""

import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Target(NamedTuple):
    """A server and the path of a request."""

    host: str
    """Name or address to connect to."""
    port: int
    authority: str
    """Value of the Host header."""
    path: str
    """Path with the query."""
    key: str = ""
    """API key; empty for none."""
    tls: ssl.SSLContext | None = None
    """None for plain HTTP."""
    name: str | None = None
    """Name in the certificate, with TLS."""
    source: str = ""
    """Address of this machine to connect from; empty for any."""
    stream: str = ""
    """Value of the header X-Stream; empty for none."""


def local_target(url: str) -> Target:
    """Parse the URL of a server on this machine, without TLS; raise ValueError if it is another one."""
    target = parse_target(url)
    if target.tls:
        raise ValueError(f"{url} does not start with http://")
    if not is_loopback(target.host):
        raise ValueError(f"load may only be sent to this machine (127.0.0.1, ::1 or localhost), not to {target.host}")
    return target


def parse_target(url: str, key: str = "", ca: Path | None = None) -> Target:
    """Parse the URL of any server; `key` is its API key, `ca` the PEM file of the only CAs to trust, None for the system's.

    Raises:
        ValueError: The URL has another scheme than http and https, no host, or a user; or the file contains no certificate.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url} does not start with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise ValueError("a URL must not contain a user or password; --key-file names the file of an API key")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.scheme == "http":
        return Target(parts.hostname, parts.port or 80, parts.netloc, path, key)
    return Target(parts.hostname, parts.port or 443, parts.netloc, path, key, _trust(ca), parts.hostname)


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address; no other name is resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _trust(ca: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"cannot read CA certificates from {ca}: {error.strerror}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context
