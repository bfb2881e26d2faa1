"""One embedded Triton with the bench's fixture models, shared by all tests of the bench that need one."""

from collections.abc import AsyncIterator, Iterator

import pytest

from app.triton.client import TritonClient
from bench.harness.triton import Triton, fixture_triton


@pytest.fixture(scope="session")
def fixtures() -> Iterator[Triton]:
    """The Triton, running."""
    with fixture_triton() as triton:
        yield triton


@pytest.fixture
async def fixture_client(fixtures: Triton) -> AsyncIterator[TritonClient]:
    """A client of it. Not for the session: while gRPC is in use, a process that is forked may crash."""
    client = TritonClient(fixtures.settings.triton_url, fixtures.settings.control_key_path)
    yield client
    await client.close()
