"""Ports and unix sockets: which are free, who has them, and answers of servers on this machine."""

import os
import socket
from pathlib import Path

import pytest

from app.host.http import get, get_status
from app.host.ports import NEREID, is_free, is_loopback, is_this_machine, remove_stale_socket, resolve
from bench.harness.ports import find_free
from tests.fakes.http import listening_on, scripted
from tests.processes import PATIENCE_SECONDS
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

ALL = "0.0.0.0"  # noqa: S104 - for a moment


@pytest.mark.parametrize(
    ("listens", "asked"),
    [("127.0.0.1", "127.0.0.1"), (ALL, "127.0.0.1"), ("127.0.0.1", ALL), pytest.param("::1", "::1", marks=NEEDS_IPV6)],
)
def test_port_is_in_use_while_someone_listens(listens: str, asked: str) -> None:
    """A connection that the server closed, which the kernel remembers for a minute, does not take the port, nor does asking."""
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.create_server((listens, 0), family=family) as server:
        port = server.getsockname()[1]
        assert not is_free(asked, port)
        with socket.create_connection((asked, port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert [is_free(asked, port) for _ in range(2)] == [True] * 2


def test_free_ports_are_found_without_those_in_use_and_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = find_free(20)
    assert len(set(ports)) == len(ports) == 20
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        candidates = iter([used, ports[0], ports[0], used, ports[1]])
        monkeypatch.setattr("secrets.choice", lambda _: next(candidates))
        assert sorted(find_free(2)) == sorted(ports[:2])


@pytest.mark.parametrize(
    ("host", "is_here", "is_only_for_here"),
    [
        ("127.9.9.9", True, True),
        (ALL, True, False),
        (socket.gethostname(), True, None),
        ("203.0.113.1", False, False),
        ("a..b", False, None),
    ],
)
def test_a_host_may_be_this_machine_or_loopback(host: str, is_here: bool, is_only_for_here: bool | None) -> None:  # noqa: FBT001
    assert is_this_machine(host) is is_here
    if is_only_for_here is not None:
        assert is_loopback(host) is is_only_for_here


@NEEDS_IPV6
@pytest.mark.parametrize("addresses", [["::1", "127.0.0.1"], ["127.0.0.1", "::1"]])
def test_ipv4_address_is_preferred_where_the_server_listens_and_where_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    look_up = socket.getaddrinfo

    def look_up_both(host: str, *arguments: int, **options: int) -> object:
        return [entry for address in (addresses if host == "both" else [host]) for entry in look_up(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_both)
    assert (resolve("both"), resolve("127.0.0.2"), resolve("::")) == ("127.0.0.1", "127.0.0.2", "::")
    with socket.create_server((resolve("both"), 0)) as server:
        assert not is_free("both", server.getsockname()[1])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("gateway worker-12", True),
        ("/srv/.venv/bin/python3.11 -P -m app api", True),
        ("/usr/bin/python3 /usr/local/bin/nereid serve --port 80", True),
        ("bash -c nereid serve", False),
        ("python -m app doctor", False),
    ],
)
def test_command_of_nereid_is_recognised(command: str, *, expected: bool) -> None:
    assert (NEREID.search(command) is not None) is expected


def test_socket_is_free_unless_someone_listens_there(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    assert remove_stale_socket(path)
    assert not remove_stale_socket(tmp_path / "folder" / "api.sock")
    with listening_on(path), socket.socket(socket.AF_UNIX) as client:
        assert not remove_stale_socket(path)
        client.connect(str(path))
    assert path.is_socket()
    assert remove_stale_socket(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "something else is there"),
        ("file/api.sock", "Not a directory"),
        ("x" * 108, "too long"),
    ],
)
def test_path_that_cannot_be_a_socket_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    """What is no socket stays: a path that was mistyped may be that of a file which somebody needs."""
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    with pytest.raises(OSError, match=message):
        remove_stale_socket(tmp_path / path)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("place", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6), "socket"])
def test_status_is_that_of_the_answer_and_no_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A proxy in the environment is for other machines; a unix socket takes the place of host and port."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(os.environ, "no_proxy", "")
    path = tmp_path / "api.sock" if place == "socket" else None
    with scripted(204, 503, path=path, host="127.0.0.1" if path else place) as server:
        url = f"http://127.0.0.1:{free_port()}" if path else server.url
        assert get_status(url + "/livez", PATIENCE_SECONDS, path) == 204
        assert get(url, PATIENCE_SECONDS, path, key="ops.secret") == (503, "")
    assert [asked.partition(b"\r\n")[0] for asked in server.asked] == [b"GET /livez HTTP/1.1", b"GET / HTTP/1.1"]
    assert [b"X-API-Key: ops.secret\r\n" in asked for asked in server.asked] == [False, True]


@pytest.mark.parametrize("said", [b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n", None])
def test_server_that_does_not_answer_in_http_or_is_not_there_has_no_status(tmp_path: Path, said: bytes | None) -> None:
    for path in (None, tmp_path / "api.sock"):
        with scripted(said, path=path) as server:
            assert get_status(server.url, 0.2 if said is None else PATIENCE_SECONDS, path) is None
        assert get_status(server.url, PATIENCE_SECONDS, path) is None
