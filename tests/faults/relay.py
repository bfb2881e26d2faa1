"""Bytes that are passed on from one connection to another."""

import asyncio
from contextlib import suppress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(one: Connection, other: Connection) -> None:
    """Pass on what comes over each of two connections to the other one, until both are closed."""
    await asyncio.gather(_forward(one[0], other[1]), _forward(other[0], one[1]))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
