"""Who has sent a request, if there is a proxy in front."""

from ipaddress import ip_network
from typing import Any

import pytest

from app.api.caller.client_address import client_address

PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))
UNIX = ("", "0")
"""What the server says of a connection to its unix socket."""


@pytest.mark.parametrize(
    ("peer", "named", "address"),
    [
        *((peer, "192.0.2.7", "192.0.2.7") for peer in (UNIX, None, ("10.1.2.3", 1), ("::ffff:10.1.2.3", 1))),
        (("2001:db8::1", 1), "2001:db8:1::7", "2001:db8:1::7"),
        # A peer that is not trusted cannot name another client.
        *(((peer, 1), "192.0.2.7", peer) for peer in ("192.0.2.1", "::1", "::ffff:192.0.2.1")),
        # Without an address the connection counts.
        *((("10.1.2.3", 1), named, "10.1.2.3") for named in (None, "", "192.0.2.7, 10.0.0.1", "192.0.2.7:80", "\xe4", "<script>")),
        (UNIX, "unknown", ""),
    ],
)
def test_trusted_proxy_names_the_client(peer: Any, named: str | None, address: str) -> None:  # noqa: ANN401
    headers = {} if named is None else {b"x-real-ip": named.encode("latin-1")}
    assert client_address({"client": peer}, headers, PROXIES) == address  # type: ignore[typeddict-item]
