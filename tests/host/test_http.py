"""Statuses of servers on this machine, over TCP and unix sockets."""

import os
from pathlib import Path

import pytest

from app.host.http import get, get_status
from tests.fakes.http import listening_on, scripted
from tests.processes import PATIENCE_SECONDS
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port


@pytest.mark.parametrize("status", [200, 302, 404, 503])
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6)])
@pytest.mark.parametrize("path", ["/livez", ""])
def test_status_is_that_of_the_answer(status: int, host: str, path: str) -> None:
    with scripted(status, host=host) as server:
        assert get_status(server.url + path, PATIENCE_SECONDS) == status

    assert server.asked[0].startswith(f"GET {path or '/'} HTTP/1.1\r\n".encode())


def test_unix_socket_takes_the_place_of_host_and_port(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with scripted(204, path=path) as server:
        assert get_status(f"http://127.0.0.1:{free_port()}/livez", PATIENCE_SECONDS, path) == 204

    assert server.asked[0].startswith(b"GET /livez HTTP/1.1\r\n")


def test_a_key_is_sent_if_there_is_one() -> None:
    with scripted(204) as server:
        for key in ("", "ops.secret"):
            get(server.url, PATIENCE_SECONDS, key=key)

    assert [b"X-API-Key: ops.secret\r\n" in asked for asked in server.asked] == [False, True]


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is for other machines."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(os.environ, "no_proxy", "")
    with scripted(200) as server:
        assert get_status(server.url, PATIENCE_SECONDS) == 200


@pytest.mark.parametrize("said", [b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n", b"HTTP/1.1 2"])
def test_an_answer_that_is_not_http_has_no_status(said: bytes) -> None:
    with scripted(said) as server:
        assert get_status(server.url, PATIENCE_SECONDS) is None


@pytest.mark.parametrize("is_unix", [False, True])
def test_a_server_that_says_nothing_has_no_status(tmp_path: Path, is_unix: bool) -> None:  # noqa: FBT001
    path = tmp_path / "api.sock" if is_unix else None
    with scripted(None, path=path) as server:
        assert get_status(server.url, 0.2, path) is None


def test_without_a_server_there_is_no_status(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    url = f"http://127.0.0.1:{free_port()}"
    assert get_status(url, PATIENCE_SECONDS) is None
    assert get_status(url, PATIENCE_SECONDS, path) is None
    listening_on(path).close()

    assert get_status(url, PATIENCE_SECONDS, path) is None
