"""Ports: which are free, and finding some."""

import socket

import pytest

from app.host.ports import find_free, is_free, is_loopback


def test_port_is_free_until_someone_listens() -> None:
    """A listening socket takes the port, and gives it back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)

    assert is_free("127.0.0.1", port)


def test_asking_does_not_take_the_port() -> None:
    """A port that was free is still free."""
    (port,) = find_free(1)

    assert [is_free("127.0.0.1", port) for _ in range(3)] == [True] * 3


def test_port_is_free_right_after_a_connection() -> None:
    """A connection that the server closed, which the kernel remembers for a minute, does not take the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""

    assert is_free("127.0.0.1", port)


def test_port_of_all_addresses_is_in_use_on_each() -> None:
    """A server on all addresses also listens on loopback, and a server on loopback blocks all addresses."""
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - for a moment
        assert not is_free("127.0.0.1", server.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("0.0.0.0", server.getsockname()[1])  # noqa: S104 - nobody listens


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6_address_has_ports_too() -> None:
    """The host may be an IPv6 address."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert not is_free("::1", port)

    assert is_free("::1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_an_error(host: str) -> None:
    """A server cannot listen there, which is not the same as a port in use."""
    with pytest.raises(OSError, match=r"\w"):
        is_free(host, *find_free(1))


@pytest.mark.parametrize("count", [0, 1, 20])
def test_free_ports_are_found(count: int) -> None:
    """They are different, free, and below those from which the kernel picks ports for outgoing connections."""
    ports = find_free(count)

    assert len(set(ports)) == len(ports) == count
    assert all(1024 <= port < 32768 and is_free("127.0.0.1", port) for port in ports)


def test_ports_in_use_and_doubles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port on which someone listens is not found, and no port is found twice."""
    one, other = find_free(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        candidates = iter([server.getsockname()[1], one, one, server.getsockname()[1], other])
        monkeypatch.setattr("secrets.choice", lambda _: next(candidates))

        assert sorted(find_free(2)) == sorted([one, other])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),  # noqa: S104 - nobody listens
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(host: str, expected: bool) -> None:  # noqa: FBT001
    """Whether it is written as a number or as a name; listening on all addresses is not loopback."""
    assert is_loopback(host) is expected
