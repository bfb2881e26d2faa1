"""HTTP/1.1 over a bare connection, as hostile clients send what no library lets through, and a way to a server that can be cut."""

import asyncio
import json
import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit

PATIENCE_SECONDS = 60.0
NO_ANSWER = 0
"""Status of a request after which the connection was closed without an answer."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    """By name in lower case."""
    body: bytes
    seconds: float = 0.0
    """From the first byte sent to the last one received."""

    @property
    def code(self) -> str:
        """Of a problem; empty for an answer that is none."""
        is_problem = self.headers.get("content-type") == "application/problem+json"
        return str(json.loads(self.body)["code"]) if is_problem else ""


class Case(NamedTuple):
    label: str
    """Says what is special about it."""
    request: bytes


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str) -> Self:
        """Connect to the server of a URL, or of a unix socket: `unix:` and its path."""
        if url.startswith("unix:"):
            return cls(*await asyncio.open_unix_connection(url.removeprefix("unix:"), limit=2**20))
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=2**20))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> Answer:
        """Receive one answer; its status is `NO_ANSWER` if the server closed the connection instead."""
        started = perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
                body = await self._read_body(headers)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(NO_ANSWER, {}, b"")
        return Answer(int(head[0].split()[1]), headers, body, perf_counter() - started)

    async def ask(self, request: bytes) -> Answer:
        """Send a request and receive its answer, which may come before the request was sent completely."""
        started = perf_counter()
        with suppress(ConnectionError):
            self.writer.write(request)
        answer = await self.receive()
        return answer._replace(seconds=perf_counter() - started)

    async def wait_closed(self) -> None:
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def stop_reading(self) -> None:
        """Leave in the kernel's buffers whatever the server sends from now on."""
        cast("asyncio.Transport", self.writer.transport).pause_reading()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.readexactly(int(headers.get("content-length", "0")))
        chunks = []
        while size := int(await self.reader.readline(), 16):
            chunks.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readline()
        return b"".join(chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def encode(body: bytes, path: str = "/detect", method: str = "POST", **headers: str) -> bytes:
    """Build a request; an underscore in the name of a header stands for a hyphen."""
    lines = [f"{method} {path} HTTP/1.1", "Host: nereid"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def ask(url: str, request: bytes) -> Answer:
    """Send one request over a connection of its own."""
    async with await Connection.open(url) as connection:
        return await connection.ask(request)


async def ask_all(url: str, cases: Iterable[Case], clients: int = 8) -> list[tuple[str, Answer]]:
    """Send all requests over a few connections; return the label and the answer of each."""
    left = iter(cases)
    answers: list[tuple[str, Answer]] = []

    async def run_client() -> None:
        connection = await Connection.open(url)
        for case in left:
            answer = await connection.ask(case.request)
            answers.append((case.label, answer))
            if answer.status == NO_ANSWER or answer.headers.get("connection") == "close" or connection.reader.at_eof():
                connection.abort()
                connection = await Connection.open(url)
        connection.abort()

    await asyncio.gather(*(run_client() for _ in range(clients)))
    return answers


class Line:
    """A way to a server that can be cut. It runs in the event loop of the test."""

    def __init__(self, server: str, tls: ssl.SSLContext | None = None) -> None:
        """Lead to a server at `host:port` or `unix:/path`, from callers that use TLS if there is a context for it."""
        self._there = server if server.startswith("unix:") else f"tcp://{server}"
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def open(self, host: str = "127.0.0.1", sock: socket.socket | None = None) -> None:
        """Accept connections, always at the same port, or those of a socket."""
        sock = sock or socket.create_server((host, self.port))
        self._listener = await asyncio.start_server(self._connect, sock=sock, ssl=self._tls)
        self.port = sock.getsockname()[1]

    def cut(self) -> None:
        """Accept no connections any more, and break those that there are."""
        if self._listener is not None:
            self._listener.close()
        self.reset()

    def reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await Connection.open(self._there)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there.writer}
        self._writers |= both
        await asyncio.gather(_forward(reader, there.writer), _forward(there.reader, writer))
        self._writers -= both


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
