"""A pool of two Tritons that answer as a test wants."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import pytest

from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.transport import Transport
from tests.fakes.triton import FakeTriton, serving
from tests.support import TABLE, eventually


class Two(NamedTuple):
    pool: TritonPool
    fakes: list[FakeTriton]

    @property
    def servers(self) -> list[TritonBackend]:
        return self.pool.servers


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    fakes = [FakeTriton(), FakeTriton()]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving(fake))
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(fake.url), TABLE) for fake in fakes])
        stack.push_async_callback(pool.close)
        await eventually(lambda: all(server.client.server for server in pool.servers))
        yield Two(pool, fakes)
