"""Ports and unix sockets: which are free, and finding some."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from app.host.ports import (
    NEREID,
    holder,
    is_free,
    is_loopback,
    is_this_machine,
    remove_stale_socket,
    resolve,
)
from bench.harness.ports import find_free
from tests.fakes.http import listening_on
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture


def test_port_is_free_until_someone_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)

    assert is_free("127.0.0.1", port)


def test_asking_does_not_take_the_port() -> None:
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
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - for a moment
        assert not is_free("127.0.0.1", server.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free("0.0.0.0", server.getsockname()[1])  # noqa: S104 - nobody listens


@NEEDS_IPV6
def test_ipv6_address_has_ports_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert not is_free("::1", port)

    assert is_free("::1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(OSError, match=r"\w"):
        is_free(host, *find_free(1))


@pytest.mark.parametrize("count", [0, 1, 20])
def test_free_ports_are_found(count: int) -> None:
    ports = find_free(count)

    assert len(set(ports)) == len(ports) == count
    assert all(1024 <= port < 32768 and is_free("127.0.0.1", port) for port in ports)


def test_ports_in_use_and_doubles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = find_free(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        candidates = iter([server.getsockname()[1], one, one, server.getsockname()[1], other])
        monkeypatch.setattr("secrets.choice", lambda _: next(candidates))

        assert sorted(find_free(2)) == sorted([one, other])


@pytest.mark.parametrize(
    ("host", "is_here", "is_only_for_here"),
    [
        ("127.0.0.1", True, True),
        ("127.9.9.9", True, True),
        ("localhost", True, True),
        pytest.param("::1", True, True, marks=NEEDS_IPV6),
        ("0.0.0.0", True, False),  # noqa: S104 - nobody listens
        pytest.param("::", True, False, marks=NEEDS_IPV6),
        (socket.gethostname(), True, None),
        ("203.0.113.1", False, False),
        ("no-such-host.invalid", False, None),
        ("http://127.0.0.1", False, None),
        ("a..b", False, None),
        ("x" * 70, False, None),
    ],
)
def test_a_host_may_be_this_machine_or_loopback(host: str, is_here: bool, is_only_for_here: bool | None) -> None:  # noqa: FBT001
    assert is_this_machine(host) is is_here
    if is_only_for_here is not None:
        assert is_loopback(host) is is_only_for_here


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::", "::1"])  # noqa: S104 - nobody listens
def test_address_is_its_own_address(host: str) -> None:
    assert resolve(host) == host


def test_name_has_an_address() -> None:
    """Servers that take only addresses can then listen at a name."""
    with socket.create_server((resolve("localhost"), 0)) as server:
        assert is_loopback(server.getsockname()[0])


@pytest.mark.parametrize("addresses", [["::1", "127.0.0.1"], ["127.0.0.1", "::1"]])
def test_ipv4_address_is_preferred(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    look_up = socket.getaddrinfo
    found = [entry for address in addresses for entry in look_up(address, None, type=socket.SOCK_STREAM)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert resolve("localhost") == "127.0.0.1"


@NEEDS_IPV6
def test_port_is_looked_for_where_the_server_will_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def look_up_both(host: str, *arguments: int, **options: int) -> object:
        addresses = ["::1", "127.0.0.1"] if host == "both" else [host]
        return [entry for address in addresses for entry in look_up(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_both)
    with socket.create_server((resolve("both"), 0)) as server:
        assert not is_free("both", server.getsockname()[1])


def test_unknown_host_has_no_address() -> None:
    with pytest.raises(OSError, match=r"\w"):
        resolve("no-such-host.invalid")


def test_holder_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = holder(port)

    assert found is not None
    assert (found[0], found[1].split()[0]) == (os.getpid(), psutil.Process().cmdline()[0].split()[0])
    assert holder(port) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("nereid worker-1", True),
        ("nereid-2", True),
        ("gateway worker-12", True),
        ("/srv/.venv/bin/python3.11 -P -m app api", True),
        ("/usr/bin/python3 /usr/local/bin/nereid serve --port 80", True),
        ("/usr/local/bin/nereid serve", True),
        ("bash -c nereid serve", False),
        ("python -m pytest tests/app", False),
        ("python -m app doctor", False),
        ("nginx: worker process", False),
        ("", False),
    ],
)
def test_command_of_nereid_is_recognised(command: str, expected: bool) -> None:  # noqa: FBT001
    assert (NEREID.search(command) is not None) is expected


def test_socket_that_does_not_exist_is_free(tmp_path: Path) -> None:
    assert remove_stale_socket(tmp_path / "api.sock")
    assert not remove_stale_socket(tmp_path / "folder" / "api.sock")
    assert list(tmp_path.iterdir()) == []


def test_stale_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    listening_on(path).close()
    assert path.is_socket()

    assert remove_stale_socket(path)
    assert not path.exists()


def test_socket_in_use_stays(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with listening_on(path), socket.socket(socket.AF_UNIX) as client:
        assert not remove_stale_socket(path)

        client.connect(str(path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "something else is there"),
        (".", "something else is there"),
        ("file/api.sock", "Not a directory"),
        ("x" * 108, "too long"),  # the kernel allows 107 bytes
    ],
)
def test_path_that_cannot_be_a_socket_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    """What is no socket stays: a path that was mistyped may be that of a file which somebody needs."""
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    with pytest.raises(OSError, match=message):
        remove_stale_socket(tmp_path / path)

    assert (tmp_path / "file").read_text(encoding="utf-8") == "precious"
