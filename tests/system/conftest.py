"""Fixtures of modules whose Triton has the settings of their fixture `own`."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from app.triton.client import TritonClient
from tests.support import started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many blocks of the documentation were run."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, [])]
    lines = [
        f"{report.nodeid.partition('[')[2].rstrip(']')}: {value[0]} run, {value[1]} not run"
        for report in reports
        for name, value in report.user_properties
        if name == "blocks" and any(value)
    ]
    if lines:
        terminalreporter.section("blocks of the documentation")
        terminalreporter.line("\n".join(sorted(lines)))


@pytest.fixture(scope="module")
def own_triton(own: Settings) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(own)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
async def gateway(own: Settings, own_triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    assert own_triton.poll() is None
    async with started(create_app(own)) as client:
        yield client


@pytest.fixture
async def own_client(own: Settings, own_triton: EmbeddedTriton) -> AsyncIterator[TritonClient]:
    assert own_triton.poll() is None
    client = TritonClient(own.triton_address)
    yield client
    await client.close()
