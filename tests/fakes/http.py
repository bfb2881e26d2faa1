"""HTTP servers on loopback and on unix sockets."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve with a handler until the block ends; yields the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(body: bytes, status: int = 200, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Answer GET of every path with the same body; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with serving(Handler, tls) as url:
        yield url


class Script:
    """Gives each connection the next answer, and keeps what was asked."""

    def __init__(self, listening: socket.socket, answers: tuple[int | bytes | None, ...]) -> None:
        self.asked: list[bytes] = []
        self.url = "http://nereid"
        if listening.family != socket.AF_UNIX:
            host, port = listening.getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._listening, self._answers = listening, iter(answers)
        self._silent: list[socket.socket] = []

    def run(self) -> None:
        with suppress(OSError):  # in the end
            while True:
                connection, _ = self._listening.accept()
                asked = b""
                while b"\r\n\r\n" not in asked and (chunk := connection.recv(4096)):
                    asked += chunk
                self.asked.append(asked)
                answer = next(self._answers, 200)
                if isinstance(answer, int):
                    answer = f"HTTP/1.1 {answer} Whatever\r\nContent-Length: 0\r\n\r\n".encode()
                if answer is None:
                    self._silent.append(connection)
                else:
                    with connection:
                        connection.sendall(answer)
        for connection in self._silent:
            connection.close()


@contextmanager
def scripted(*answers: int | bytes | None, host: str = "127.0.0.1", port: int = 0, path: Path | None = None) -> Iterator[Script]:
    """Give one connection after the other these answers: a status, bytes, or None: nothing until the block ends; at last 200."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with listening_on(path) if path else socket.create_server((host, port), family=family) as listening:
        server = Script(listening, answers)
        thread = Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def listening_on(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server
