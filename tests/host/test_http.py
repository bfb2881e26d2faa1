"""Statuses of servers on this machine, over TCP and unix sockets."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.host.http import get_status
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

PATIENCE_SECONDS = 10.0


class Server:
    """Answers the one connection it accepts with the same bytes whatever it is asked, and keeps what it was asked."""

    def __init__(self, listening: socket.socket, answer: bytes) -> None:
        self.asked = b""
        self.is_over = threading.Event()
        self._listening, self._answer = listening, answer

    def run(self) -> None:
        connection, _ = self._listening.accept()
        with connection:
            while b"\r\n\r\n" not in self.asked and (chunk := connection.recv(4096)):
                self.asked += chunk
            connection.sendall(self._answer)
            if not self._answer:
                self.is_over.wait()


@contextmanager
def answering(listening: socket.socket, answer: bytes) -> Iterator[Server]:
    """Run a server that gives this answer; if that is empty, it says nothing until the block ends."""
    with listening:
        server = Server(listening, answer)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            thread.join()


def on_tcp(host: str = "127.0.0.1") -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    return listening, f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def on_unix(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    return listening


def answer(status: int) -> bytes:
    return f"HTTP/1.1 {status} Whatever\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.mark.parametrize("status", [200, 302, 404, 503])
def test_status_is_that_of_the_answer(status: int) -> None:
    listening, url = on_tcp()
    with answering(listening, answer(status)) as server:
        assert get_status(f"{url}/livez", PATIENCE_SECONDS) == status

    assert server.asked.startswith(b"GET /livez HTTP/1.1\r\n")


def test_url_without_a_path_is_the_root() -> None:
    listening, url = on_tcp()
    with answering(listening, answer(200)) as server:
        assert get_status(url, PATIENCE_SECONDS) == 200

    assert server.asked.startswith(b"GET / HTTP/1.1\r\n")


@NEEDS_IPV6
def test_ipv6_address_is_reached() -> None:
    listening, url = on_tcp("::1")
    with answering(listening, answer(200)):
        assert get_status(url, PATIENCE_SECONDS) == 200


def test_unix_socket_takes_the_place_of_host_and_port(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with answering(on_unix(path), answer(204)) as server:
        assert get_status(f"http://127.0.0.1:{free_port()}/livez", PATIENCE_SECONDS, path) == 204

    assert server.asked.startswith(b"GET /livez HTTP/1.1\r\n")


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is for other machines."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setitem(os.environ, "no_proxy", "")
    listening, url = on_tcp()
    with answering(listening, answer(200)):
        assert get_status(url, PATIENCE_SECONDS) == 200


@pytest.mark.parametrize("said", [b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n", b"HTTP/1.1 2"])
def test_an_answer_that_is_not_http_has_no_status(said: bytes) -> None:
    listening, url = on_tcp()
    with answering(listening, said):
        assert get_status(url, PATIENCE_SECONDS) is None


@pytest.mark.parametrize("is_unix", [False, True])
def test_a_server_that_says_nothing_has_no_status(tmp_path: Path, is_unix: bool) -> None:  # noqa: FBT001
    path = tmp_path / "api.sock" if is_unix else None
    listening, url = (on_unix(path), "http://nereid") if path else on_tcp()
    with answering(listening, b""):
        assert get_status(url, 0.2, path) is None


def test_without_a_server_there_is_no_status(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    url = f"http://127.0.0.1:{free_port()}"
    assert get_status(url, PATIENCE_SECONDS) is None
    assert get_status(url, PATIENCE_SECONDS, path) is None
    on_unix(path).close()

    assert get_status(url, PATIENCE_SECONDS, path) is None
