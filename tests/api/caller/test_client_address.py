"""Who has sent a request, if there is a proxy in front."""

from ipaddress import ip_network
from typing import Any

import pytest

from app.api.caller.client_address import client_address

PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))
UNIX = ("", "0")
"""What the server says of a connection to its unix socket."""


def client_of(peer: Any, named: str | None) -> str:  # noqa: ANN401
    """Return the address that is logged for a request from `peer` with this `X-Real-IP`."""
    headers = {} if named is None else {b"x-real-ip": named.encode("latin-1")}
    return client_address({"client": peer}, headers, PROXIES)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("peer", [UNIX, None, ("10.1.2.3", 1), ("2001:db8::1", 1), ("::ffff:10.1.2.3", 1)])
@pytest.mark.parametrize("named", ["192.0.2.7", "2001:db8:1::7"])
def test_a_trusted_proxy_is_believed(peer: object, named: str) -> None:
    assert client_of(peer, named) == named


@pytest.mark.parametrize("peer", ["192.0.2.1", "11.0.0.1", "::1", "::ffff:192.0.2.1"])
def test_an_untrusted_peer_cannot_name_another_client(peer: str) -> None:
    assert client_of((peer, 1), "192.0.2.7") == peer


@pytest.mark.parametrize("named", [None, "", "unknown", "192.0.2.7, 10.0.0.1", "192.0.2.7:80", "\xe4", "<script>"])
def test_without_an_address_the_connection_counts(named: str | None) -> None:
    assert client_of(("10.1.2.3", 1), named) == "10.1.2.3"
    assert client_of(UNIX, named) == ""
