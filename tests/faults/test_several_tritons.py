"""One of two Tritons is killed or hangs, and comes back, behind a gateway of two workers that uses both."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from app.embedded.server import EmbeddedTriton
from bench.harness.triton import Triton, embedded_triton
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import ask, encode
from tests.faults.serving import count_images, gateway_to, stopped
from tests.faults.traffic import traffic

_SHARE = 0.4
"""What a Triton that is back must get of the images."""
_REQUESTS = 500


@pytest.fixture
def tritons(fault_repository: Path) -> Iterator[list[Triton]]:
    with embedded_triton(fault_repository, "checksum") as one, embedded_triton(fault_repository, "checksum") as other:
        yield [one, other]


def _addresses(tritons: list[Triton]) -> str:
    return ",".join(triton.address for triton in tritons)


async def until_share(tritons: list[Triton], place: int) -> float:
    """Wait until a Triton has got its share of the images for a while; return after how many seconds."""
    started = monotonic()
    before = [await count_images(triton, "checksum") for triton in tritons]
    while True:
        await asyncio.sleep(0.5)
        now = [await count_images(triton, "checksum") for triton in tritons]
        images = [after - first for after, first in zip(now, before, strict=True)]
        if images[place] >= _SHARE * sum(images) > 0:
            return monotonic() - started
        assert monotonic() < started + 30, images
        before = now


@contextmanager
def successor(triton: Triton) -> Iterator[EmbeddedTriton]:
    """Make a Triton that takes the place of another one once that was killed; stop it in the end."""

    class Successor(EmbeddedTriton):
        def claim(self) -> None:
            triton.server.stop()
            super().claim()

    server = Successor(triton.settings)
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.system
async def test_killed_triton_costs_no_caller_an_answer(tritons: list[Triton], tmp_path: Path, record_figure: RecordFigure) -> None:
    first, second = tritons
    with gateway_to(first, tmp_path, triton_endpoints=_addresses(tritons)) as gateway, successor(first) as again:
        async with traffic(gateway.url) as counted:
            await counted.until(_REQUESTS)
            first.process.kill()
            await counted.until(counted.requests + _REQUESTS)
            health: dict[str, Any] = {}
            while not health or not health["tritons"][0]["left_out"]:  # a worker that did not call it does not know that it is lost
                await counted.until(counted.requests + 1)
                health = json.loads((await ask(gateway.url, encode(b"", "/health", "GET"))).body)
            await asyncio.to_thread(again.start)
            seconds = await until_share(tritons, 0)
            await counted.until(counted.requests + _REQUESTS)
            second.process.kill()
            await counted.until(counted.requests + _REQUESTS)
    counted.record(record_figure, "SIGKILL of one of two Tritons, twice")
    record_figure(f"a Triton that was started again: {_SHARE:.0%} of the images after, s", seconds)

    assert set(counted.statuses) == {200}
    assert health["status"] == "healthy"
    assert [(one["status"], one["left_out"]) for one in health["tritons"]] == [("unreachable", ["checksum"]), ("ready", [])]


async def test_hung_triton_costs_a_client_one_deadline_at_most(
    tritons: list[Triton], tmp_path: Path, record_figure: RecordFigure
) -> None:
    with gateway_to(tritons[0], tmp_path, triton_endpoints=_addresses(tritons)) as gateway:
        async with traffic(gateway.url) as counted:
            await counted.until(_REQUESTS)
            async with stopped(tritons[0].process):
                await asyncio.sleep(12)  # more than two deadlines
            seconds = await until_share(tritons, 0)
    counted.record(record_figure, "SIGSTOP of one of two Tritons")
    missed = max(statuses[504] for statuses in counted.by_client.values())
    record_figure("SIGSTOP of one of two Tritons: most deadlines that a client missed", missed, 1)
    record_figure(f"a Triton that was continued: {_SHARE:.0%} of the images after, s", seconds, 5)

    assert set(counted.statuses) <= {200, 504}
