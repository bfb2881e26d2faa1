"""Bytes that are passed on from one connection to another."""

import asyncio
import ssl
from contextlib import suppress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: str) -> Connection:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.partition(":")
    return await asyncio.open_connection(host, int(port))


async def relay(one: Connection, other: Connection) -> None:
    """Pass on what comes over each of two connections to the other one, until both are closed."""
    await asyncio.gather(_forward(one[0], other[1]), _forward(other[0], one[1]))


class Line:
    """A way to a server that can be cut. It runs in the event loop of the test."""

    def __init__(self, server: str, tls: ssl.SSLContext | None = None) -> None:
        """Lead to a server at `host:port` or `unix:/path`, from callers that use TLS if there is a context for it."""
        self._there = server
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def open(self, host: str = "127.0.0.1") -> None:
        """Accept connections, always at the same port."""
        self._listener = await asyncio.start_server(self._connect, host, self.port, ssl=self._tls)
        self.port = self._listener.sockets[0].getsockname()[1]

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
            there = await connect(self._there)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there[1]}
        self._writers |= both
        await relay((reader, writer), there)
        self._writers -= both


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
