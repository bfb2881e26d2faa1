"""Embedded Tritons with the bench's fixture models, shared by all tests of the bench that need one."""

from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from app.settings.schema import Settings
from app.triton.client import TritonClient
from bench.experiments import overload as burst
from bench.harness.triton import Triton, embedded_triton, fixture_triton
from bench.models.repository import write_fixture


@pytest.fixture
def short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits around a burst, and the search for the peak before it."""
    monkeypatch.setattr(burst, "PEAK_CLIENTS", (1, 4))
    for name in ("RECOVERY_SECONDS", "WATCH_SECONDS", "PROBE_SECONDS"):
        monkeypatch.setattr(burst, name, 0.3)


@pytest.fixture(scope="session")
def fixtures() -> Iterator[Triton]:
    with fixture_triton(['null','wait_20','sim_gpu']) as triton:
        yield triton


@pytest.fixture
async def fixture_client(fixtures: Triton) -> AsyncIterator[TritonClient]:
    """A client of it. Not for the session: while gRPC is in use, a process that is forked may crash."""
    client = TritonClient(fixtures.settings.triton_address)
    yield client
    await client.close()


@pytest.fixture(scope="session")
def reloadable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings for a Triton elsewhere, whose models can be loaded again; it runs `wait_20`."""
    repository = tmp_path_factory.mktemp("reloadable")
    write_fixture("wait_20", repository)
    with embedded_triton(repository, "wait_20") as triton:
        yield msgspec.structs.replace(triton.settings, triton_endpoints=triton.settings.triton_address)
