"""HTTP servers on loopback and on unix sockets, among them a host of images.

That has a certificate of an authority of its own, and answers what a test wants.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import trustme

from app.remote.fetcher import Fetcher
from app.remote.public import is_public

HOST = "images.example.org"
LOOPBACK = "127.0.0.1"

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
"""A whole response, or what writes it."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def answer(self, body: bytes = b"", status: int = 200, content_type: str = "") -> None:
        self.send_response(status)
        if content_type:
            self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
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
    class Answering(Handler):
        def do_GET(self) -> None:
            self.answer(body, status)

    with serving(Answering, tls) as url:
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

    def run(self) -> None:
        with ExitStack() as silent, suppress(OSError):  # in the end
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
                    silent.enter_context(connection)
                else:
                    with connection:
                        connection.sendall(answer)


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


def response(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    """Make a response; its length is declared unless a header does that."""
    lines = [f"HTTP/1.1 {status}", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return response(b"elsewhere", status, f"Location: {location}")


class Host:
    """The answers of a host, and the requests that it got."""

    def __init__(self, scheme: str = "https") -> None:
        self.scheme = scheme
        self.authority = trustme.CA()
        self.names: dict[str, Sequence[str]] = {HOST: [LOOPBACK]}
        """What names resolve to; any other does not."""
        self.answers: dict[str, Answer] = {}
        """By path, with the query."""
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path and headers, in lower case, of each request."""
        self.lookups: Counter[str] = Counter()
        self.open_connections = 0
        self.port = 0

    def url(self, path: str = "/cat.jpg", host: str = HOST) -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def fetcher(self, *hosts: str, max_bytes: int = 2**20, **others: Any) -> Fetcher:  # noqa: ANN401
        """Make a fetcher that trusts the authority and treats loopback as public."""
        trust = ssl.create_default_context()
        self.authority.configure_trust(trust)
        given = {"resolve": self.resolve, "is_allowed": lambda found: found == LOOPBACK or is_public(found), "trust": trust}
        return Fetcher(hosts or (f"*:{self.port}",), max_bytes, **{**given, **others})

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        assert 0 < port < 2**16
        self.lookups[name] += 1
        if name not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[name]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.rstrip().split("\r\n")
            path = first.split(" ")[1]
            self.requests.append((path, {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}))
            answer = self.answers.get(path, response(b"nothing here", "404 Not Found"))
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            self.open_connections -= 1
            writer.close()


@asynccontextmanager
async def serving_host(*names: str, scheme: str = "https") -> AsyncIterator[Host]:
    """Run a host, whose certificate has these names, until the block ends; one of http has none."""
    host = Host(scheme)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if scheme == "https" else None
    if context is not None:
        host.authority.issue_cert(*(names or (HOST,))).configure_cert(context)

    server = await asyncio.start_server(host.answer, LOOPBACK, 0, ssl=context)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
